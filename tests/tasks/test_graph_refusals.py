"""Wrong graphs are refused on the line that writes them, with the names and numbers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, ClassVar

import pytest
import torch

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.tasks import Access, Op, TensorType, TileRule
from hyper_mpmd.tasks.graph import RUN_OPTIONS
from hyper_mpmd.testing.sample_ops import Halves, ScaleInPlace

ops = hm.ops


class Fixture:
    """A graph with one of everything, for a test to add the wrong line to."""

    def __init__(self, ranks: int = 1) -> None:
        self.g = hm.TaskGraph("g", ranks=ranks)
        self.rows = self.g.rows("tokens", groups=3)
        self.other_rows = self.g.rows("others", groups=3)
        self.x = self.g.input("x", (self.rows, 8))
        self.o = self.g.input("o", (self.other_rows, 8))
        self.w = self.g.input("w", (3, 8, 6))
        self.plain = self.g.input("plain", (5, 8))
        self.h = self.g.cube("h", ops.GroupedMatmul(), self.x, self.w)


class Mixer(Op):
    core: ClassVar[Any] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),), (Access("rows", "cols"),)),
        outputs=((Access("rows", "cols"),),),
    )

    def shapes(self, inputs):
        return (TensorType(inputs[0].shape, inputs[0].dtype),)


class MixerInPlace(Mixer):
    inplace: ClassVar[dict[int, int]] = {0: 0}


class ColumnSum(Op):
    """Sums rows that may be none: then nobody would write the sum."""

    core: ClassVar[Any] = "vector"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.0",
        cols="in0.1",
        inputs=((Access("rows", "cols"),),),
        outputs=((Access("all", "cols"),),),
        cut_rows=False,
    )

    def shapes(self, inputs):
        return (TensorType((1, inputs[0].shape[1]), inputs[0].dtype),)


class GroupsMeet(Op):
    """Every group writes the same rows."""

    core: ClassVar[Any] = "cube"
    rule: ClassVar[TileRule] = TileRule(
        rows="in0.1",
        cols="in0.1",
        reduction="in0.0",
        by_group=True,
        inputs=((Access("reduction", "all"),),),
        outputs=((Access("rows", "cols"),),),
    )

    def shapes(self, inputs):
        return (TensorType((inputs[0].shape[1], inputs[0].shape[1]), inputs[0].dtype),)


class Wanderer(ops.SwiGLU):
    """A vector op that says where rows go."""

    def routing(self):
        return "all", 0


class Homebody(ops.Put):
    """A communication op that does not."""

    def routing(self):
        return None


def undefined(f):
    return hm.TaskGraph("other").input("x", (4, 8))


REFUSALS = {
    "name with a space": (lambda f: f.g.rows("a b"), errors.NameTakenError, ValueError, ["'a b'"]),
    "row space twice": (lambda f: f.g.rows("tokens"), errors.NameTakenError, ValueError, ["'tokens'"]),
    "no groups": (lambda f: f.g.rows("r", groups=0), errors.LoadsError, ValueError, ["'r'", "0"]),
    "tensor twice": (lambda f: f.g.input("x", (4,)), errors.NameTakenError, ValueError, ["'x'"]),
    "task named like a tensor": (
        lambda f: f.g.cube("x", ops.GroupedMatmul(), f.x, f.w),
        errors.NameTakenError,
        ValueError,
        ["'x'"],
    ),
    "four dimensions": (lambda f: f.g.input("t", (1, 2, 3, 4)), errors.ShapeError, ValueError, ["'t'", "1 to 3"]),
    "zero dimension": (lambda f: f.g.input("t", (4, 0)), errors.ShapeError, ValueError, ["'t'", "dimension 1", "0"]),
    "row space second": (lambda f: f.g.input("t", (4, f.rows)), errors.ShapeError, ValueError, ["'tokens'", "1 of 2"]),
    "row space of another graph": (
        lambda f: f.g.input("t", (hm.TaskGraph("b").rows("tokens"), 4)),
        errors.RowSpaceError,
        ValueError,
        ["'tokens'", "another graph"],
    ),
    "dtype": (lambda f: f.g.input("t", (4,), "float64"), errors.DTypeError, TypeError, ["'float64'", "bfloat16"]),
    "cube op as vector": (
        lambda f: f.g.vector("y", ops.GroupedMatmul(), f.x, f.w),
        errors.CoreKindError,
        TypeError,
        ["'y'", "GroupedMatmul", "cube", "vector"],
    ),
    "class instead of op": (
        lambda f: f.g.cube("y", ops.GroupedMatmul, f.x, f.w),
        errors.CoreKindError,
        TypeError,
        ["'y'", "GroupedMatmul()"],
    ),
    "too few inputs": (
        lambda f: f.g.cube("y", ops.GroupedMatmul(), f.x),
        errors.ShapeError,
        ValueError,
        ["'y'", "2 inputs, got 1"],
    ),
    "not a tensor": (
        lambda f: f.g.cube("y", ops.GroupedMatmul(), f.x, "w"),
        errors.UnknownTensorError,
        ValueError,
        ["'y'", "'w'"],
    ),
    "tensor of another graph": (
        lambda f: f.g.vector("y", ops.SwiGLU(), undefined(f)),
        errors.UnknownTensorError,
        ValueError,
        ["x[4, 8]", "another graph"],
    ),
    "tensor before it exists": (
        lambda f: f.g.vector("y", ops.SwiGLU(), f.x.model_copy(update={"name": "later"})),
        errors.UnknownTensorError,
        ValueError,
        ["'later'", "does not exist", "'g'"],
    ),
    "inner dimensions": (
        lambda f: f.g.cube("y", ops.GroupedMatmul(), f.h, f.w),
        errors.ShapeError,
        ValueError,
        ["'y'", "w[3, 8, 6]", "h[tokens, 6]", "8", "6"],
    ),
    "number of groups": (
        lambda f: f.g.cube("y", ops.GroupedMatmul(), f.x, f.g.input("w4", (4, 8, 6))),
        errors.ShapeError,
        ValueError,
        ["'y'", "w4[4, 8, 6]", "holds 4 groups", "3"],
    ),
    "plain rows by group": (
        lambda f: f.g.cube("y", ops.GroupedMatmul(), f.plain, f.g.input("w2", (8, 6))),
        errors.ShapeError,
        ValueError,
        ["'y'", "w2[8, 6]", "no dimension 2"],
    ),
    "odd columns": (
        lambda f: f.g.vector("y", ops.SwiGLU(), f.g.input("odd", (4, 7))),
        errors.ShapeError,
        ValueError,
        ["odd[4, 7]"],
    ),
    "mixed row spaces": (
        lambda f: f.g.vector("y", Mixer(), f.x, f.o),
        errors.RowSpaceError,
        ValueError,
        ["'y'", "'tokens'", "'others'", "x[tokens, 8]", "o[others, 8]"],
    ),
    "row space meets plain rows": (
        lambda f: f.g.vector("y", Mixer(), f.x, f.plain),
        errors.RowSpaceError,
        ValueError,
        ["'y'", "x[tokens, 8]", "plain[5, 8]"],
    ),
    "mixed dtypes": (
        lambda f: f.g.cube("y", ops.Matmul(), f.plain, f.g.input("b", (8, 4), "bfloat16")),
        errors.DTypeError,
        TypeError,
        ["plain[5, 8] float32", "b[8, 4] bfloat16"],
    ),
    "index dtype": (
        lambda f: f.g.vector("y", ops.Permute(), f.plain, f.g.input("i", (f.rows,), "int64")),
        errors.DTypeError,
        TypeError,
        ["i[tokens] int64", "int32"],
    ),
    "put without a row space": (
        lambda f: f.g.comm("y", ops.Put(), f.plain),
        errors.RowSpaceError,
        ValueError,
        ["'y'", "plain[5, 8]"],
    ),
    "combine without dispatch": (
        lambda f: f.g.comm("y", ops.Combine(), f.x),
        errors.RowSpaceError,
        ValueError,
        ["'y'", "'tokens'", "not scattered"],
    ),
    "vector op that routes": (
        lambda f: f.g.vector("y", Wanderer(), f.x),
        errors.OpRuleError,
        ValueError,
        ["'y'", "Wanderer"],
    ),
    "comm op that does not": (
        lambda f: f.g.comm("y", Homebody(), f.x),
        errors.OpRuleError,
        ValueError,
        ["'y'", "Homebody"],
    ),
    "rows that may be none": (
        lambda f: f.g.vector("y", ColumnSum(), f.x),
        errors.OpRuleError,
        ValueError,
        ["'y'", "ColumnSum", "'tokens'", "y[1, 8]"],
    ),
    "groups that write one another's rows": (
        lambda f: f.g.cube("y", GroupsMeet(), f.x),
        errors.OpRuleError,
        ValueError,
        ["'y'", "GroupsMeet", "y[8, 8]"],
    ),
    "in place on an input": (
        lambda f: f.g.vector("y", ScaleInPlace(), f.x),
        errors.OverwrittenTensorError,
        ValueError,
        ["'y'", "'x'"],
    ),
    "in place on another operand too": (
        lambda f: f.g.vector("y", MixerInPlace(), f.h, f.h),
        errors.OverwrittenTensorError,
        ValueError,
        ["'y'", "'h'"],
    ),
    "two outputs, one of a name that is taken": (
        lambda f: (f.g.input("t.0", (2, 2)), f.g.vector("t", Halves(), f.h)),
        errors.NameTakenError,
        ValueError,
        ["'g'", "'t.0'"],
    ),
    "an input that run could not be given": (
        lambda f: f.g.input("workers", (2, 2)),
        errors.NameTakenError,
        ValueError,
        ["'workers'", "rename"],
    ),
    "a dtype that is no name": (lambda f: f.g.input("z", (2, 2), []), errors.DTypeError, TypeError, ["'z'", "[]"]),
    "a parameter out of range": (
        lambda f: ops.Put(to="shift", shift=-1),
        errors.OpParameterError,
        ValueError,
        ["Put(shift=-1)", "0"],
    ),
    "a parameter that no op has": (
        lambda f: ops.Matmul(bias=True),
        errors.OpParameterError,
        ValueError,
        ["Matmul(bias=True)"],
    ),
    "output of an input": (lambda f: f.g.output("y", f.x), errors.UnknownTensorError, ValueError, ["'y'", "'x'"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_line_is_refused_with_names_and_numbers(name):
    line, kind, builtin, words = REFUSALS[name]
    fixture = Fixture()
    with pytest.raises(kind) as caught:
        line(fixture)
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, hm.HyperMpmdError)
    for word in words:
        assert word in str(caught.value)
    assert [node.name for node in fixture.g.nodes] == ["h"]


def test_names_that_inputs_cannot_have_are_the_options_of_run():
    from hyper_mpmd.engine.group import GroupEngine

    taken = set()
    for method in (hm.Plan.run, hm.Plan.run_measured, GroupEngine.run, GroupEngine.run_measured):
        taken |= {p.name for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert taken == set(RUN_OPTIONS)


def test_graphs_and_plans_can_be_copied_and_pickled_at_any_time():
    fixture = Fixture()
    fixture.g.output("y", fixture.h)
    plan = hm.compile(fixture.g, {"tokens": [1, 2, 3], "others": [0, 0, 0]})
    plan.run(x=torch.ones(6, 8), o=torch.ones(0, 8), w=torch.ones(3, 8, 6), plain=torch.ones(5, 8))
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert copied == plan
        assert not copied.tasks.flags.writeable
    for again in (pickle.loads(pickle.dumps(fixture.g)), copy.deepcopy(fixture.g)):
        assert again == fixture.g


def test_groups_that_no_world_can_share_out_are_refused():
    fixture = Fixture(ranks=2)
    with pytest.raises(errors.WorldSizeError, match=r"'y'.*3 groups of 'tokens'.*2 ranks"):
        fixture.g.comm("y", ops.Dispatch(), fixture.x)


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_wrong_number_of_ranks_is_refused(ranks):
    with pytest.raises(errors.WorldSizeError, match="ranks is"):
        hm.TaskGraph("g", ranks=ranks)


def test_overwritten_tensor_is_refused_afterwards_and_outputs_are_never_overwritten():
    fixture = Fixture()
    fixture.g.vector("scaled", ScaleInPlace(), fixture.h)
    with pytest.raises(errors.OverwrittenTensorError, match=r"'h' was overwritten in place by task 'scaled'"):
        fixture.g.vector("again", ScaleInPlace(), fixture.h)
    fixture = Fixture()
    fixture.g.output("y", fixture.h)
    with pytest.raises(errors.OverwrittenTensorError, match=r"'scaled'.*'h', which is an output"):
        fixture.g.vector("scaled", ScaleInPlace(), fixture.h)
    with pytest.raises(errors.NameTakenError, match="output 'y'"):
        fixture.g.output("y", fixture.h)


def test_two_row_spaces_of_one_made_by_hand_and_one_by_a_put_do_not_merge():
    fixture = Fixture()
    fixture.g.rows("tokens.all", groups=3)
    with pytest.raises(errors.NameTakenError, match=r"'tokens.all'.*rename"):
        fixture.g.comm("y", ops.Put(), fixture.x)
