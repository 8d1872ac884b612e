"""Put bandwidth against memcpy, and signal latency, between two processes.

    python benchmarks/shmem.py [--json]

A put and a plain copy of the same bytes take turns, so that what else the machine does strikes both; reported is the
ratio of each pair, as median and spread (10th to 90th percentile). Latency is half a round trip of two signals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from hyper_mpmd import shmem

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def timed(call: Any, times: int) -> float:
    """Seconds of one call, from `times` in a row."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def bandwidth(nbytes: int, pairs: int) -> dict[str, Any]:
    """Rank 0 puts into rank 1, which waits in a barrier; GB/s of both kinds and their ratio, pair by pair."""
    remote = shmem.empty(nbytes, dtype=torch.uint8)
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    shmem.barrier()
    result: dict[str, Any] = {}
    if shmem.debug_state()["rank"] == 0:
        times = max(1, (8 << 20) // nbytes)
        puts, copies = [], []
        for pair in range(pairs + 2):
            # Turn and turn about, so that neither is always the one to find the caches warm.
            order = (puts, copies) if pair % 2 else (copies, puts)
            for kept in order:
                call = (lambda: shmem.put(remote, source, 1)) if kept is puts else (lambda: target.copy_(source))
                kept.append(nbytes / timed(call, times) / 1e9)
        puts, copies = puts[2:], copies[2:]  # the first ones touch their pages for the first time
        result = {
            "nbytes": nbytes,
            "put_gb_s": spread(puts),
            "memcpy_gb_s": spread(copies),
            "ratio": spread([put / copy for put, copy in zip(puts, copies, strict=True)]),
        }
    shmem.barrier()
    shmem.free(remote)
    return result


def latency(rounds: int, blocks: int) -> dict[str, float]:
    """Microseconds from a signal on one rank to its being seen on the other, `blocks` times over `rounds` rounds."""
    slots = shmem.empty(2, 16, dtype=torch.int32)
    slots.zero_()
    shmem.barrier()
    rank = shmem.debug_state()["rank"]
    mine, theirs = slots[rank, 0], slots[1 - rank, 0]
    samples = []
    number = 0
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(rounds):
            number += 1
            if rank == 0:
                shmem.signal(theirs, number, 1)
                shmem.wait_signal(mine, number)
            else:
                shmem.wait_signal(mine, number)
                shmem.signal(theirs, number, 0)
        samples.append((time.perf_counter() - began) / rounds / 2 * 1e6)
    shmem.barrier()
    shmem.free(slots)
    return spread(samples)


def rank_main(rank: int, pairs: int, results: Any) -> None:
    """One of the two ranks; rank 0 reports."""
    import os

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", HYPER_PARALLEL_SHMEM_HEAP_SIZE=str(64 << 20))
    torch.set_num_threads(1)
    shmem.acquire()
    report = {"bandwidth": [bandwidth(nbytes, pairs) for nbytes in SIZES], "signal_us": latency(500, 21)}
    shmem.release()
    if rank == 0:
        results.put(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", dest="pairs", type=int, default=41, help="pairs of runs to compare")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(arguments.pairs, results), nprocs=2)
    report = results.get()
    if arguments.json:
        print(json.dumps(report))
        return
    for row in report["bandwidth"]:
        ratio = row["ratio"]
        print(
            f"put {row['nbytes'] >> 10:6d} KiB: {row['put_gb_s']['median']:6.2f} GB/s, memcpy "
            f"{row['memcpy_gb_s']['median']:6.2f} GB/s, put/memcpy {ratio['median']:.2f} "
            f"({ratio['p10']:.2f} to {ratio['p90']:.2f})"
        )
    signal = report["signal_us"]
    print(f"signal, one way: {signal['median']:.2f} us ({signal['p10']:.2f} to {signal['p90']:.2f})")


if __name__ == "__main__":
    main()
