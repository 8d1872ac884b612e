"""Rows round a ring of ranks: each puts its rows straight into the next rank's memory and signals; no rank receives.

    python examples/ring.py --ranks 4                                    # starts its ranks itself
    torchrun --standalone --nproc-per-node 4 examples/ring.py            # or torchrun does
    RANK=0 WORLD_SIZE=2 python examples/ring.py &                        # without a process group
    RANK=1 WORLD_SIZE=2 python examples/ring.py

After `world` steps every row is back where it began, having been in every rank's memory.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hyper_mpmd import shmem

ROWS, HIDDEN = 64, 256


def ring(steps: int) -> None:
    """`steps` steps round the ring; raises AssertionError where a row is not what was sent."""
    heap = shmem.acquire()
    rank, world = heap.rank, heap.world_size
    target, source = (rank + 1) % world, (rank - 1) % world

    # Two buffers: while rows arrive in one, the other is on its way to the next rank.
    rows = shmem.empty(2, ROWS, HIDDEN)
    # One line of 64 bytes a slot: `arrived` is written by the rank before us, `taken` by the rank after us.
    slots = shmem.empty(2, 16, dtype=torch.int32)
    arrived, taken = slots[0, 0], slots[1, 0]
    slots.zero_()
    rows[0] = torch.arange(ROWS * HIDDEN).view(ROWS, HIDDEN) + rank
    shmem.barrier()  # everybody's slots are zero before anybody signals

    for step in range(1, steps + 1):
        here, there = rows[(step - 1) % 2], rows[step % 2]
        # The target's buffer `there` held what it sent on in the step before: it says when that has left.
        shmem.wait_signal(taken, step - 1, "ge")
        shmem.put(there, here, target)
        shmem.signal(arrived, step, target)
        shmem.wait_signal(arrived, step, "ge")
        shmem.signal(taken, step, source)
        origin = (rank - step) % world
        expected = torch.arange(ROWS * HIDDEN).view(ROWS, HIDDEN) + origin
        assert torch.equal(there, expected), f"rank {rank}, step {step}: not the rows of rank {origin}"

    shmem.barrier()
    shmem.free(rows)
    shmem.free(slots)
    shmem.release()
    if rank == 0:
        print(f"{steps} steps round {world} ranks: every row arrived as sent ({rows.nbytes // 2} bytes a step)")


def spawned(rank: int, world: int, steps: int, port: int) -> None:
    """One rank of torch.multiprocessing, with a process group."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        ring(steps)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start when nobody else started them")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--port", type=int, default=29517, help="of the process group, when ranks are started here")
    arguments = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        try:
            ring(arguments.steps)
        finally:
            dist.destroy_process_group()
    elif "RANK" in os.environ:
        ring(arguments.steps)
    else:
        mp.spawn(spawned, args=(arguments.ranks, arguments.steps, arguments.port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
