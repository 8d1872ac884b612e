"""What planning costs: nanoseconds a task at 10^4 to 10^6 tasks, the native planner against its twin, and whole calls.

    python benchmarks/planning.py [--rounds N] [--json]

Each figure is the median of N runs with the 10th and 90th percentile beside it. `cpu` is processor time of this
process, which a busy machine disturbs less than `wall`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hyper_mpmd as hm
from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.descriptor import describe
from hyper_mpmd.scheduler.device import get_device
from hyper_mpmd.scheduler.loads import check_loads
from hyper_mpmd.testing import programs

NATIVE, TWIN = get_backend("native"), get_backend("python")


def moe(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, ranks: int = 1, seed: int = 0) -> Any:
    """A Mixture-of-Experts feed-forward and skewed loads for it."""
    graph = hm.TaskGraph("moe-ffn", ranks=ranks)
    local = graph.rows("local")
    rows = graph.rows("tokens", groups=experts)
    x = graph.input("x", (local, hidden), "bfloat16")
    sent = graph.vector("permute", hm.ops.Permute(), x, graph.input("index", (rows,), "int32"))
    if ranks > 1:
        sent = graph.comm("dispatch", hm.ops.Dispatch(), sent)
    w1 = graph.input("w1", (experts // ranks, hidden, 2 * intermediate), "bfloat16")
    w2 = graph.input("w2", (experts // ranks, intermediate, hidden), "bfloat16")
    h = graph.cube("up", hm.ops.GroupedMatmul(), sent, w1)
    y = graph.cube("down", hm.ops.GroupedMatmul(), graph.vector("act", hm.ops.SwiGLU(), h), w2)
    if ranks > 1:
        y = graph.comm("combine", hm.ops.Combine(), y)
    back, weights = graph.input("back", (local, top_k), "int32"), graph.input("weights", (local, top_k))
    graph.output("out", graph.vector("unpermute", hm.ops.Unpermute(), y, back, weights))
    rng = np.random.default_rng(seed)
    counts = np.stack([rng.multinomial(tokens * top_k, rng.dirichlet(np.ones(experts))) for _ in range(ranks)])
    return graph, {"tokens": counts, "local": np.full(ranks, tokens)}


def measure(name: str, call: Callable[[], Any], repeat: int, per: int = 1, unit: str = "us") -> dict[str, Any]:
    """Median and spread of one call, divided by `per`."""
    scale = {"ns": 1, "us": 1e3, "ms": 1e6}[unit] * per
    wall, cpu = [], []
    call()  # warm
    for _ in range(repeat):
        cpu_begin, begin = time.process_time_ns(), time.perf_counter_ns()
        call()
        wall.append((time.perf_counter_ns() - begin) / scale)
        cpu.append((time.process_time_ns() - cpu_begin) / scale)
    low, middle, high = np.percentile(wall, [10, 50, 90]).round(2).tolist()
    return {"name": name, "unit": unit, "wall": middle, "p10": low, "p90": high, "cpu": round(float(np.median(cpu)), 2)}


def rows(repeat: int) -> list[dict[str, Any]]:
    found = []
    few = max(3, repeat // 5)
    device = get_device("ascend-a3")
    for tokens, experts in ((192, 16), (1024, 64), (12288, 256)):
        graph, loads = moe(tokens, 7168, 2048, experts, 8)
        descriptor, given = describe(graph), dict.fromkeys(range(5), (32, 64))
        by_space = {descriptor.space_names.index(n): c for n, c in check_loads(graph, loads).items()}
        arguments = (descriptor, by_space, device, [0], given)
        (program,) = NATIVE.lower(*arguments)
        count = len(program.tasks)
        times = few if count > 20_000 else repeat
        label = f"{count} tasks"
        found.append(measure(f"lower, {label}", lambda a=arguments: NATIVE.lower(*a), times, count, "ns"))
        for policy in ("O0", "O1"):
            call = lambda p=program, policy=policy: NATIVE.schedule(p, device, policy)  # noqa: E731
            found.append(measure(f"schedule {policy}, {label}", call, times, count, "ns"))
    for shape, program in (
        ("chain", programs.chain(10**6)),
        ("flat", programs.flat(10**6)),
        ("grid", programs.grid(1000)),
    ):
        call = lambda p=program: NATIVE.schedule(p, device, "O1")  # noqa: E731
        found.append(measure(f"schedule O1, {shape} of 10^6", call, few, 10**6, "ns"))

    graph, loads = moe(256, 512, 256, 8, 2)
    descriptor = describe(graph)
    by_space = {descriptor.space_names.index(n): c for n, c in check_loads(graph, loads).items()}
    for name, backend in (("native", NATIVE), ("twin", TWIN)):
        call = lambda b=backend: b.plan(descriptor, by_space, device, "O1", [0], {})  # noqa: E731
        count = len(call()[0][0]["tasks"])
        found.append(measure(f"{name}: plan of {count} tasks", call, repeat, count, "ns"))

    for name, (graph, loads), options in (
        ("moe-ffn, 8 experts, cpu", moe(1024, 1024, 512, 8, 2), {"device": "cpu"}),
        ("moe-ffn, 256 experts, ascend-a3", moe(4096, 7168, 2048, 256, 8), {"device": "ascend-a3"}),
        (
            "the same, rank 0 of 64",
            moe(4096, 7168, 2048, 256, 8, ranks=64),
            {"device": "ascend-a3", "world": 64, "rank": 0},
        ),
        ("the same, all of 8 ranks", moe(4096, 7168, 2048, 256, 8, ranks=8), {"device": "ascend-a3", "world": 8}),
    ):
        call = lambda g=graph, c=loads, o=options: hm.compile(g, c, prove=False, **o)  # noqa: E731
        found.append(measure(f"compile {name}", call, repeat, unit="us"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", "--repeat", dest="repeat", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="machine-readable rows on stdout")
    options = parser.parse_args()
    found = rows(options.repeat)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if options.json:
        print(json.dumps({"rows": found, "peak_mib": peak}))
        return
    for row in found:
        spread = f"{row['p10']:.2f} to {row['p90']:.2f}"
        print(f"{row['name']:48} {row['wall']:10.2f} {row['unit']}  ({spread}; cpu {row['cpu']:.2f})")
    print(f"peak memory {peak} MiB")


if __name__ == "__main__":
    main()
