"""Each CPU kernel against what the machine allows and against torch, on one thread.

    python benchmarks/kernels.py [--rounds 15] [--json] [--only gemm]

Contenders of a case run in turn, round after round in one process, so that a noisy neighbour hits all of them. Weights
rotate through more memory than the last-level cache holds, as experts' do.

Printed per contender: median time, the quartiles' distance as a share of it, and the share of the bound reached. The
bound is the larger of bytes moved over the bandwidth of a copy, and FLOPs over the rate of the fastest large product,
both measured at the start of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hyper_mpmd import _native
from hyper_mpmd.engine import torch_gemm

K = _native.kernels
DTYPES = {torch.float32: K.DType.float32, torch.bfloat16: K.DType.bfloat16}
COLD_BYTES = 128 << 20  # more than the last-level caches of the machines this is meant for
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass
class Case:
    """One kernel at one size. Each contender takes the number of the round, to pick its copy of the data."""

    name: str
    bytes: int
    flops: int
    contenders: dict[str, Callable[[int], object]]
    times: dict[str, list[float]] = field(default_factory=dict)


def gemm_call(way, x, w, y, transpose_w=False):
    m, k = x.shape
    n = y.shape[1]
    K.gemm_by(
        way, DTYPES[x.dtype], m, n, k, x.data_ptr(), k, w.data_ptr(), w.shape[1], y.data_ptr(), n, False, transpose_w
    )


def gemm_case(m: int, k: int, n: int, dtype: torch.dtype, transpose_w: bool = False) -> Case:
    size = torch.finfo(dtype).bits // 8
    copies = max(1, min(32, COLD_BYTES // (k * n * size)))
    x, y = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
    w = [torch.randn((n, k) if transpose_w else (k, n)).to(dtype) for _ in range(copies)]

    def own(i):
        gemm_call(K.GemmWay.own, x, w[i % copies], y, transpose_w)

    def lent(i):
        gemm_call(K.GemmWay.lent, x, w[i % copies], y, transpose_w)

    def eager(i):
        weights = w[i % copies]
        torch.mm(x, weights.T if transpose_w else weights, out=y)

    contenders = {"own": own, "lent": lent, "torch": eager}
    if dtype == torch.bfloat16 and m * n * k > 2**26:
        del contenders["torch"]  # seconds a call on processors without bf16 multiply
    name = f"gemm{' wT' if transpose_w else ''} {SHORT[dtype]} {m}x{k}x{n}"
    return Case(name, size * (k * n + m * k + m * n), 2 * m * k * n, contenders)


def swiglu_case(rows: int, cols: int, dtype: torch.dtype) -> Case:
    size = torch.finfo(dtype).bits // 8
    copies = max(1, COLD_BYTES // (3 * rows * cols * size))
    h = [torch.randn(rows, 2 * cols).to(dtype) for _ in range(copies)]
    out = [torch.ones(rows, cols, dtype=dtype) for _ in range(copies)]  # written, so that no page is new

    def own(i):
        gate_up, to = h[i % copies], out[i % copies]
        at = gate_up.data_ptr()
        K.swiglu(DTYPES[dtype], rows, cols, at, 2 * cols, at + cols * size, 2 * cols, to.data_ptr(), cols)

    def eager(i):
        gate, up = h[i % copies].chunk(2, dim=1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out[i % copies])

    return Case(f"swiglu {SHORT[dtype]} {rows}x{cols}", 3 * rows * cols * size, 0, {"own": own, "torch": eager})


def gather_case(rows: int, cols: int, dtype: torch.dtype) -> Case:
    size = torch.finfo(dtype).bits // 8
    x_rows = COLD_BYTES // (cols * size)
    x, out = torch.randn(x_rows, cols).to(dtype), torch.empty(rows, cols, dtype=dtype)
    index = torch.randperm(x_rows, dtype=torch.int32).split(rows)  # every row in turn, none while it is in a cache
    count = x_rows // rows

    def own(i):
        K.gather_rows(
            DTYPES[dtype], rows, cols, x.data_ptr(), cols, x_rows, index[i % count].data_ptr(), out.data_ptr(), cols
        )

    def eager(i):
        torch.index_select(x, 0, index[i % count], out=out)

    return Case(f"gather {SHORT[dtype]} {rows}x{cols}", 2 * rows * cols * size, 0, {"own": own, "torch": eager})


def unpermute_case(tokens: int, k: int, cols: int, dtype: torch.dtype) -> Case:
    size = torch.finfo(dtype).bits // 8
    y_rows = COLD_BYTES // (cols * size)
    y, out = torch.randn(y_rows, cols).to(dtype), torch.empty(tokens, cols, dtype=dtype)
    index = torch.randperm(y_rows, dtype=torch.int32).split(tokens * k)
    count = y_rows // (tokens * k)
    weights = torch.rand(tokens, k)

    def own(i):
        at = index[i % count].data_ptr()
        K.unpermute(
            DTYPES[dtype], tokens, k, cols, y.data_ptr(), cols, y_rows, at, weights.data_ptr(), out.data_ptr(), cols
        )

    def eager(i):
        rows = y[index[i % count]].view(tokens, k, cols)
        out.copy_(torch.bmm(weights[:, None, :], rows.float()).squeeze(1))

    return Case(
        f"unpermute {SHORT[dtype]} {tokens}x{k}x{cols}",
        (k + 1) * tokens * cols * size,
        0,
        {"own": own, "torch": eager},
    )


def convert_case(rows: int, cols: int) -> Case:
    copies = COLD_BYTES // (6 * rows * cols)
    x = [torch.randn(rows, cols) for _ in range(copies)]
    out = [torch.ones(rows, cols, dtype=torch.bfloat16) for _ in range(copies)]

    def own(i):
        source, to = x[i % copies], out[i % copies]
        K.convert(rows, cols, K.DType.float32, source.data_ptr(), cols, K.DType.bfloat16, to.data_ptr(), cols)

    def eager(i):
        out[i % copies].copy_(x[i % copies])

    return Case(f"narrow {rows}x{cols}", 6 * rows * cols, 0, {"own": own, "torch": eager})


def cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    tiles = [(128, 4096, 512), (128, 512, 4096), (64, 2048, 1408), (256, 256, 256)]
    few = [(m, 2048, 1408) for m in (1, 2, 4, 8, 14, 16, 28, 32)] + [(8, 4096, 4096)]
    return [
        *(gemm_case(*shape, fp32) for shape in tiles + few),
        *(gemm_case(*shape, fp32, transpose_w=True) for shape in (tiles[0], few[3])),
        *(gemm_case(*shape, bf16) for shape in (tiles[0], tiles[2], few[0], few[3])),
        *(swiglu_case(128, 1408, dtype) for dtype in (fp32, bf16)),
        *(gather_case(128, 2048, dtype) for dtype in (fp32, bf16)),
        *(unpermute_case(128, 2, 2048, dtype) for dtype in (fp32, bf16)),
        convert_case(128, 2048),
    ]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bandwidth() -> float:
    """Bytes read plus bytes written a second by a large copy."""
    source = torch.ones(COLD_BYTES // 4)
    to = torch.empty_like(source)
    return 2 * COLD_BYTES / min(seconds(lambda: to.copy_(source)) for _ in range(6))


def flop_rate() -> float:
    """FLOP a second of the fastest product of 1024 cubed."""
    x, y = torch.randn(1024, 1024), torch.empty(1024, 1024)
    products: list[Callable[[], object]] = [lambda: torch.mm(x, x, out=y), lambda: gemm_call(K.GemmWay.own, x, x, y)]
    return 2 * 1024**3 / min(seconds(product) for product in products for _ in range(5))


def measure(case: Case, rounds: int) -> None:
    inner = {name: repetitions(call) for name, call in case.contenders.items()}
    position = dict.fromkeys(inner, 0)
    for _ in range(rounds):
        for name, call in case.contenders.items():
            first = position[name]
            position[name] += inner[name]
            elapsed = seconds(lambda: [call(i) for i in range(first, first + inner[name])])  # noqa: B023
            case.times.setdefault(name, []).append(elapsed / inner[name])


def repetitions(call: Callable[[int], object]) -> int:
    """So many calls that one measurement takes about 3 ms."""
    call(0)
    return max(1, round(3e-3 / max(seconds(lambda: call(1)), 1e-7)))


def two_workers(rounds: int) -> dict[str, float]:
    """GFLOP/s of one and of two threads, each at its own tiles of 128 x 4096 x 512."""
    x, w = torch.randn(128, 4096), torch.randn(4096, 512)
    rates = {}
    for name, way in (("own", K.GemmWay.own), ("lent", K.GemmWay.lent)):
        for count in (1, 2):
            elapsed = []
            for _ in range(max(3, rounds // 3)):
                gate = threading.Barrier(count + 1)

                def work(way=way, gate=gate):
                    K.lent_gemm_thread_init()
                    y = torch.empty(128, 512)
                    gemm_call(way, x, w, y)
                    gate.wait()
                    for _ in range(10):
                        gemm_call(way, x, w, y)
                    gate.wait()

                threads = [threading.Thread(target=work) for _ in range(count)]
                for thread in threads:
                    thread.start()
                gate.wait()
                elapsed.append(seconds(gate.wait))
                for thread in threads:
                    thread.join()
            rates[f"{name}, {count} thread{'s' * (count > 1)}"] = (
                count * 10 * 2 * 128 * 4096 * 512 / statistics.median(elapsed) / 1e9
            )
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="machine-readable results on stdout")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()

    torch.set_num_threads(1)
    loan = torch_gemm.lend()
    copy_rate, product_rate = bandwidth(), flop_rate()
    print(
        f"{K.isa().name}; copy {copy_rate / 1e9:.1f} GB/s; product {product_rate / 1e9:.0f} GFLOP/s; "
        f"lent gemm: {loan.reason or 'yes'}",
        file=sys.stderr,
    )
    results = []
    for case in (case for case in cases() if options.only in case.name):
        if not loan.lent:
            case.contenders.pop("lent", None)
        measure(case, options.rounds)
        bound = max(case.bytes / copy_rate, case.flops / product_rate)
        for name, times in case.times.items():
            low, median, high = statistics.quantiles(times, n=4)
            row = {
                "case": case.name,
                "contender": name,
                "microseconds": median * 1e6,
                "spread": (high - low) / median,
                "gflops": case.flops / median / 1e9,
                "gbytes": case.bytes / median / 1e9,
                "of_bound": bound / median,
                "against_own": median / statistics.median(case.times["own"]),
            }
            results.append(row)
            print(
                "{case:28} {contender:6} {microseconds:9.1f} us ±{spread:4.0%} {gflops:6.1f} GF/s {gbytes:6.1f} GB/s "
                "{of_bound:5.0%} of bound  {against_own:5.2f} x own".format(**row),
                file=sys.stderr,
            )
    workers = two_workers(options.rounds) if loan.lent and not options.only else {}
    for name, rate in workers.items():
        print(f"{name:20} {rate:6.1f} GF/s", file=sys.stderr)
    if options.json:
        json.dump({"copy_rate": copy_rate, "flop_rate": product_rate, "cases": results, "workers": workers}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
