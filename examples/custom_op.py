"""An op of your own in one file: RMSNorm of the activations between the two matrix products of each expert.

    python examples/custom_op.py
    hyper-mpmd run examples/custom_op.py:graph
    hyper-mpmd show examples/custom_op.py:graph --measured

An op says what its core kind is, how it is cut (the tile rule), what shapes it makes, its maths in plain torch (for
comparison) and its kernel on one tile. Scheduling, waits, checks, cost and pictures follow from that.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

import hyper_mpmd as hm
from hyper_mpmd.errors import ShapeError
from hyper_mpmd.tasks import Access, CoreKind, Layout, Op, Tensor, TensorType, Tile, TileRule

LOADS = {"tokens": [96, 0, 200, 7]}


class RMSNorm(Op):
    """y = x / sqrt(mean(x * x) + eps) * scale, for each row.

    Inputs: x [R, C] float32; scale [1, C] float32. Output: [R, C] float32.
    """

    core: ClassVar[CoreKind] = "vector"
    # Tiles are rows of x; columns are never cut, because each row's mean needs all of them.
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),), (Access("all", "cols"),)),
        outputs=((Access("rows", "cols"),),),
        cut_cols=False,
        flops_per_point=4,
    )

    eps: float = 1e-6

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        x, scale = inputs
        if scale.shape[0] != 1:
            raise ShapeError(f"RMSNorm takes a scale of one row, and {scale.describe()} has {scale.shape[0]}")
        return (TensorType(x.shape, x.dtype),)

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        x, scale = inputs
        return torch.nn.functional.rms_norm(x, x.shape[1:], eps=self.eps) * scale

    def kernel(self, tile: Tile, *views: Any) -> None:
        x, scale, y = views
        torch.mul(x, (x.square().mean(dim=1, keepdim=True) + self.eps).rsqrt(), out=y)
        y.mul_(scale)


def graph() -> tuple[hm.TaskGraph, dict[str, list[int]]]:
    """Four experts: up, SwiGLU, RMSNorm, down; and how many rows each has."""
    g = hm.TaskGraph("ffn-norm")
    rows = g.rows("tokens", groups=4)
    x = g.input("x", (rows, 256))
    scale = g.input("scale", (1, 128))
    w1 = g.input("w1", (4, 256, 2 * 128))
    w2 = g.input("w2", (4, 128, 256))
    a = g.vector("act", hm.ops.SwiGLU(), g.cube("up", hm.ops.GroupedMatmul(), x, w1))
    n = g.vector("norm", RMSNorm(), a, scale)
    g.output("y", g.cube("down", hm.ops.GroupedMatmul(), n, w2))
    return g, LOADS


def main() -> None:
    g, loads = graph()
    plan = hm.compile(g, loads)
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(sum(loads["tokens"]), 256),
        "scale": torch.rand(1, 128) + 0.5,
        "w1": torch.randn(4, 256, 256) / 16,
        "w2": torch.randn(4, 128, 256) / 11,
    }
    y, reference = plan.run(**tensors)["y"], plan.run(engine="reference", **tensors)["y"]
    error = float((y - reference).abs().max() / reference.abs().max())
    print(plan.report())
    print(f"\nmax relative error against plain torch {error:.1e}")
    assert error < 1e-5, error


if __name__ == "__main__":
    main()
