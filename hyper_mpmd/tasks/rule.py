"""Tile rules: how an op is cut into tiles and which boxes each tile touches, as data.

Lowering, the prover, the cost model and the viewer read the same declaration, for built-in ops and for a user's own.

Every tensor is seen as a matrix: a 1-D tensor [R] as [R, 1], a 3-D tensor [G, K, N] as [G * K, N]. A tile is a point of
a grid over at most four axes: `group` (one group of a row space at a time), `rows` and `cols` (cut into intervals) and
`reduction` (never cut, so that sums run in one fixed order).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyper_mpmd.errors import OpRuleError

AxisName = Literal["rows", "cols", "reduction", "all"]
AXIS_NAMES: tuple[AxisName, ...] = ("rows", "cols", "reduction", "all")
MAX_FLOPS_PER_POINT = 1 << 31
EXTENT = re.compile(r"(in|out)(\d+)\.([012])")


@dataclass(frozen=True)
class Access:
    """One box of one operand, as a function of the tile.

    rows, cols: the axis that indexes the rows and the columns of the box; "all" takes the whole dimension, as
    data-dependent rows (gather by id) must.
    shift: the columns start `shift` extents of the axis later: SwiGLU reads columns j and I + j.
    group: the leading dimension of a 3-D tensor is the tile's group: the weights of one expert.
    """

    rows: AxisName
    cols: AxisName
    shift: int = 0
    group: bool = False


@dataclass(frozen=True)
class TileRule:
    """How an op is cut.

    rows, cols, reduction: where the axis takes its extent, as "in0.1" (input 0, dimension 1) or "out0.1"; None where
    the op has no such axis.
    inputs, outputs: for each operand the boxes that a tile reads or writes.
    by_group: tiles never straddle two groups of the row space (the op indexes something by group).
    cut_rows, cut_cols: whether the axis may be cut into several tiles.
    flops_per_point: floating-point operations for each point rows x cols x reduction of a tile.
    """

    rows: str | None
    cols: str | None
    inputs: tuple[tuple[Access, ...], ...]
    outputs: tuple[tuple[Access, ...], ...]
    reduction: str | None = None
    by_group: bool = False
    cut_rows: bool = True
    cut_cols: bool = True
    flops_per_point: int = 1

    def extents(self) -> dict[AxisName, str]:
        """The axes that the op has, with where each takes its extent."""
        named: dict[AxisName, str | None] = {"rows": self.rows, "cols": self.cols, "reduction": self.reduction}
        return {axis: source for axis, source in named.items() if source is not None}


def parse_extent(source: str) -> tuple[bool, int, int]:
    """Read "in0.1" or "out0.1" as (is an output, operand, dimension)."""
    match = EXTENT.fullmatch(source)
    if match is None:
        raise OpRuleError(f"an axis extent is written 'in0.1' or 'out0.1' (operand, dimension); got {source!r}")
    return match[1] == "out", int(match[2]), int(match[3])


def check_rule(op_name: str, rule: TileRule, inplace: Mapping[int, int]) -> None:
    """Refuse a tile rule that lowering could not read, or whose tiles would write a point twice or never.

    inplace: {output: input} for outputs that overwrite an input's memory. Errors name op, operand and reason.
    """
    axes = rule.extents()
    for axis, source in axes.items():
        is_output, operand, _ = parse_extent(source)
        count = len(rule.outputs if is_output else rule.inputs)
        if operand >= count:
            raise OpRuleError(f"{op_name}: axis {axis!r} takes its extent from {source!r}, but there are only {count}")
    if not rule.outputs:
        raise OpRuleError(f"{op_name}: the rule declares no outputs; a task that writes nothing can order nothing")
    if not 0 <= rule.flops_per_point <= MAX_FLOPS_PER_POINT:
        raise OpRuleError(
            f"{op_name}: flops_per_point is {rule.flops_per_point}; it counts operations, from 0 to "
            f"{MAX_FLOPS_PER_POINT}"
        )
    for side, operands in (("input", rule.inputs), ("output", rule.outputs)):
        for index, accesses in enumerate(operands):
            where = f"{op_name}: {side} {index}"
            if not accesses:
                raise OpRuleError(f"{where} declares no box; a tile touches at least one box of each operand")
            for access in accesses:
                for name, axis in (("rows", access.rows), ("cols", access.cols)):
                    if axis not in AXIS_NAMES:
                        raise OpRuleError(f"{where}: {name}={axis!r} is not an axis; axes are {', '.join(AXIS_NAMES)}")
                    if axis != "all" and axis not in axes:
                        raise OpRuleError(f"{where}: {name}={axis!r}, but the rule gives that axis no extent")
                if access.shift < 0:
                    raise OpRuleError(f"{where}: shift is {access.shift}; columns can only start later, so >= 0")
                if access.shift and access.cols == "all":
                    raise OpRuleError(f"{where}: shift is {access.shift}, but cols='all' leaves nothing to shift by")
                if access.group and not rule.by_group:
                    raise OpRuleError(f"{where} is indexed by group, but the rule does not cut by_group")
    for index, accesses in enumerate(rule.outputs):
        _check_output(op_name, rule, index, accesses)
    for output, overwritten in inplace.items():
        if not (0 <= output < len(rule.outputs) and 0 <= overwritten < len(rule.inputs)):
            raise OpRuleError(
                f"{op_name}: inplace={{{output}: {overwritten}}} names an operand that the rule does not have"
            )
        if set(rule.outputs[output]) != set(rule.inputs[overwritten]):
            raise OpRuleError(
                f"{op_name}: output {output} overwrites input {overwritten}, but a tile does not read the boxes it "
                "writes; another tile could overwrite what it has yet to read"
            )
    if len(set(inplace.values())) < len(inplace):
        raise OpRuleError(f"{op_name}: inplace={dict(inplace)} lets two outputs overwrite one input")


def _check_output(op_name: str, rule: TileRule, index: int, accesses: tuple[Access, ...]) -> None:
    """Tiles must write every point of an output exactly once."""
    written = {axis for access in accesses for axis in (access.rows, access.cols)}
    cut: set[AxisName] = {axis for axis in ("rows", "cols") if axis in rule.extents() and _may_cut(rule, axis)}
    if "reduction" in written:
        raise OpRuleError(f"{op_name}: output {index} is indexed by the reduction axis, which is summed over")
    if missing := sorted(cut - written):
        raise OpRuleError(
            f"{op_name}: output {index} does not depend on axis {missing[0]!r}, so two tiles would write one box; "
            f"index it by that axis or forbid the cut (cut_{missing[0]}=False)"
        )
    first = accesses[0]
    if first.rows == first.cols != "all":
        raise OpRuleError(
            f"{op_name}: output {index} is indexed by {first.rows!r} twice, so tiles only write a diagonal"
        )
    alike = {(access.rows, access.cols, access.group) for access in accesses}
    if len(alike) > 1 or sorted(access.shift for access in accesses) != list(range(len(accesses))):
        raise OpRuleError(
            f"{op_name}: the {len(accesses)} boxes of output {index} must differ in shift alone, with shifts 0 to "
            f"{len(accesses) - 1}, so that together the tiles write every point once"
        )


def _may_cut(rule: TileRule, axis: AxisName) -> bool:
    return rule.cut_rows if axis == "rows" else rule.cut_cols
