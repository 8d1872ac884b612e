"""All-gather fused with a matrix product: each rank puts its rows to all, and multiplies rows as they arrive.

    python examples/allgather_matmul.py [ranks]
    hyper-mpmd show examples/allgather_matmul.py:graph --measured

The put and the product are tiles of one run: a tile of the product waits for its own rows, not for the whole gather.
"""

import sys
from typing import Any

import torch

import hyper_mpmd as hm

WIDTH = 512


def graph(ranks: int = 2) -> tuple[hm.TaskGraph, dict[str, Any]]:
    """y = (x of all ranks, in order of rank) @ w; each rank has a w of its own and another number of rows."""
    g = hm.TaskGraph("allgather-matmul", ranks=ranks)
    rows = g.rows("rows")
    x = g.input("x", (rows, WIDTH))
    w = g.input("w", (WIDTH, WIDTH // ranks))
    gathered = g.comm("gather", hm.ops.Put(to="all"), x)
    g.output("y", g.cube("product", hm.ops.Matmul(), gathered, w))
    return g, {"rows": [200 + 56 * rank for rank in range(ranks)]}


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    g, loads = graph(ranks)
    world = hm.compile(g, loads, world=ranks)
    torch.manual_seed(0)
    inputs = [
        {"x": torch.randn(count, WIDTH), "w": torch.randn(WIDTH, WIDTH // ranks) / WIDTH**0.5}
        for count in loads["rows"]
    ]
    outputs = world.run(inputs)
    print(world.report())
    everything = torch.cat([given["x"] for given in inputs])
    for rank, (given, made) in enumerate(zip(inputs, outputs, strict=True)):
        wanted = everything @ given["w"]
        error = float((made["y"] - wanted).abs().max() / wanted.abs().max())
        print(f"rank {rank}: y is {list(made['y'].shape)}; max relative error against plain torch {error:.1e}")
        assert error < 1e-5, error


if __name__ == "__main__":
    main()
