"""Tile rules that lowering could not read, or whose tiles would write a point twice or never, are refused."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

import hyper_mpmd as hm
from hyper_mpmd.errors import NameTakenError, OpRuleError
from hyper_mpmd.tasks import Access, Op, TileRule
from hyper_mpmd.tasks.rule import check_rule
from hyper_mpmd.testing import sample_ops
from hyper_mpmd.testing.ops import assert_op_legal

BOX = (Access("rows", "cols"),)
FINE = TileRule(rows="in0.0", cols="in0.1", inputs=(BOX,), outputs=(BOX,))
SUMMED = dataclasses.replace(FINE, reduction="in0.1")


def but(rule: TileRule = FINE, **changes: Any) -> TileRule:
    return dataclasses.replace(rule, **changes)


REFUSALS: dict[str, tuple[TileRule, dict[int, int], list[str]]] = {
    "extent not written as one": (but(rows="in.0"), {}, ["'in0.1'", "'in.0'"]),
    "extent of an operand that is not there": (but(rows="in3.0"), {}, ["'in3.0'", "only 1"]),
    "no outputs": (but(outputs=()), {}, ["no outputs"]),
    "flops": (but(flops_per_point=-1), {}, ["flops_per_point is -1"]),
    "too many flops": (but(flops_per_point=1 << 40), {}, [str(1 << 40), str(1 << 31)]),
    "operand without boxes": (but(inputs=((),)), {}, ["input 0", "no box"]),
    "unknown axis": (but(inputs=((Access("rows", "depth"),),)), {}, ["input 0", "'depth'"]),  # type: ignore[arg-type]
    "axis without extent": (but(cols=None, cut_cols=False), {}, ["cols='cols'", "no extent"]),
    "negative shift": (but(inputs=((Access("rows", "cols", shift=-1),),)), {}, ["shift is -1"]),
    "shift of everything": (but(inputs=((Access("rows", "all", shift=1),),)), {}, ["shift is 1", "'all'"]),
    "group without groups": (but(inputs=((Access("rows", "cols", group=True),),)), {}, ["by_group"]),
    "output of the reduction": (but(SUMMED, outputs=((Access("rows", "reduction"),),)), {}, ["reduction axis"]),
    "output that ignores a cut": (but(outputs=((Access("rows", "all"),),)), {}, ["'cols'", "cut_cols=False"]),
    "diagonal": (but(cut_cols=False, outputs=((Access("rows", "rows"),),)), {}, ["'rows' twice", "diagonal"]),
    "half an output": (but(outputs=((Access("rows", "cols", shift=1),),)), {}, ["1 boxes of output 0", "0 to 0"]),
    "boxes that cross": (but(outputs=((Access("rows", "cols"), Access("cols", "rows")),)), {}, ["2 boxes of output 0"]),
    "in place of nothing": (FINE, {0: 1}, ["inplace={0: 1}"]),
    "in place, read elsewhere": (but(inputs=((Access("all", "cols"),),)), {0: 0}, ["output 0 overwrites input 0"]),
    "in place twice": (but(outputs=(BOX, BOX)), {0: 0, 1: 0}, ["two outputs"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_rule_is_refused_with_the_op_and_the_reason(name):
    rule, inplace, words = REFUSALS[name]
    with pytest.raises(OpRuleError) as caught:
        check_rule("MyOp", rule, inplace)
    for word in words:
        assert word in str(caught.value)
    assert "MyOp" in str(caught.value) or "extent" in str(caught.value)


def test_rules_are_checked_when_an_op_class_is_written():
    with pytest.raises(OpRuleError, match="declares no tile rule"):

        class Ruleless(Op):
            core: ClassVar[Any] = "vector"

    with pytest.raises(OpRuleError, match="core is 'gpu'"):

        class Coreless(Op):
            core: ClassVar[Any] = "gpu"
            rule: ClassVar[TileRule] = FINE

    with pytest.raises(NameTakenError, match="'SwiGLU' is claimed by"):

        class SwiGLU(Op):
            core: ClassVar[Any] = "vector"
            rule: ClassVar[TileRule] = FINE


COUNTS = {"rows": [5, 0, 37, 1]}
LEGAL = {
    "matmul": (hm.ops.Matmul(), [(50, 20), (20, 33)], {}),
    "grouped matmul": (hm.ops.GroupedMatmul(), [("rows", 20), (4, 20, 33)], COUNTS),
    "swiglu": (hm.ops.SwiGLU(), [("rows", 66)], COUNTS),
    "put": (hm.ops.Put(to="scatter"), [("rows", 12)], COUNTS),
    "copy": (sample_ops.Copy(), [("rows", 33)], COUNTS),
    "in place": (sample_ops.ScaleInPlace(factor=3), [("rows", 33)], COUNTS),
    "transposed": (sample_ops.Transpose(), [(33, 47)], {}),
    "two outputs": (sample_ops.Halves(), [("rows", 66)], COUNTS),
    "two boxes": (sample_ops.Interleave(), [("rows", 33)], COUNTS),
    "reduction over rows": (sample_ops.GroupedOuter(groups=4), [("rows", 20), ("rows", 33)], COUNTS),
}


@pytest.mark.parametrize("name", LEGAL)
def test_built_in_and_sample_ops_are_legal(name):
    op, shapes, loads = LEGAL[name]
    assert_op_legal(op, shapes, loads=loads)


@pytest.mark.parametrize("op", [hm.ops.Permute(), hm.ops.Unpermute()])
def test_ops_that_gather_by_index_are_legal(op):
    shapes = [(40, 24), ("rows",)] if isinstance(op, hm.ops.Permute) else [(40, 24), ("rows", 2), ("rows", 2)]
    dtypes = ["float32", "int32", "float32"][: len(shapes)]
    assert_op_legal(op, shapes, dtypes=dtypes, loads=COUNTS)


def test_a_reference_of_another_shape_than_declared_is_found_out():
    class Shorter(sample_ops.Copy):
        def reference(self, layout, *inputs):
            return inputs[0][1:]

    with pytest.raises(OpRuleError, match=r"\[40, 40\] by shapes\(\), torch.float32 \[39, 40\] by reference\(\)"):
        assert_op_legal(Shorter(), [(40, 40)])


def test_a_kernel_that_leaves_its_tile_is_found_out():
    class OffByOne(sample_ops.Copy):
        def kernel(self, tile, *views):
            views[1].copy_(views[0] + tile.number)

    with pytest.raises(OpRuleError, match=r"is off by .* from the\s+reference"):
        assert_op_legal(OffByOne(), [(40, 40)])
