"""Where the rows of each row space lie on each rank, which rows travel where; ops and tensors as plans hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler.descriptor import OP_COLUMNS, OPERAND_COLUMNS, SPACE_COLUMNS, TENSOR_COLUMNS, Descriptor
from hyper_mpmd.scheduler.records import ALIGNMENT, MAX_BYTES, MAX_INDEX, OP, ROLES, ROUTES, TENSOR, Records
from hyper_mpmd.tasks.team import Team

SCATTER, RETURN, ALL, SHIFT = (ROUTES[name] for name in ("scatter", "return", "all", "shift"))


class Row:
    """One row of a descriptor table with its columns as attributes."""

    def __init__(self, columns: tuple[str, ...], values: list[int]) -> None:
        self.__dict__.update(zip(columns, values, strict=True))

    def __getattr__(self, name: str) -> int:  # for type checkers: every column is an int
        raise AttributeError(name)


def rows_of(table: NDArray[np.int64], columns: tuple[str, ...]) -> list[Row]:
    return [Row(columns, values) for values in table.tolist()]


@dataclass(frozen=True)
class Tables:
    """A descriptor, read row by row."""

    ranks: int
    spaces: list[Row]
    tensors: list[Row]
    ops: list[Row]
    operands: list[Row]
    space_names: tuple[str, ...]
    tensor_names: tuple[str, ...]
    op_names: tuple[str, ...]

    @classmethod
    def of(cls, descriptor: Descriptor) -> Tables:
        return cls(
            descriptor.ranks,
            rows_of(descriptor.spaces, SPACE_COLUMNS),
            rows_of(descriptor.tensors, TENSOR_COLUMNS),
            rows_of(descriptor.ops, OP_COLUMNS),
            rows_of(descriptor.operands, OPERAND_COLUMNS),
            descriptor.space_names,
            descriptor.tensor_names,
            descriptor.op_names,
        )

    def team(self, row: Row) -> Team:
        """The ranks that the route of an op or row space acts within."""
        return Team(row.team, row.stride)

    def boxes(self, op: Row) -> list[Row]:
        return self.operands[op.operand_begin : op.operand_begin + op.boxes]

    def op_records(self) -> Records:
        """A plan's ops section."""
        rows = [(o.kernel, o.kind, o.dtype, o.read_boxes, o.hop, o.route, o.limit_bits) for o in self.ops]
        return np.array(rows, OP)


class Segment(NamedTuple):
    """Consecutive rows that travel together: from the sender's rows to the receiver's, within one received group."""

    source_row: int
    target_row: int
    rows: int
    target_group: int


class Layout:
    """Group sizes and offsets of every row space on every rank."""

    def __init__(self, tables: Tables, loads: Mapping[int, NDArray[np.int64]]) -> None:
        self.tables = tables
        ranks = range(tables.ranks)
        # sizes[space][rank][group]; a derived space comes after its parent
        self.sizes: list[list[list[int]]] = []
        for index, space in enumerate(tables.spaces):
            if space.route == 0:
                self.sizes.append([[int(n) for n in loads[index][rank]] for rank in ranks])
            else:
                self.sizes.append([self._derived(space, rank) for rank in ranks])
        self.offsets = [[[0, *accumulate(groups)] for groups in per_rank] for per_rank in self.sizes]
        for name, per_rank in zip(tables.space_names, self.offsets, strict=True):
            for rank, offsets in enumerate(per_rank):
                if offsets[-1] > MAX_INDEX:
                    raise PlanLimitError(
                        f"row space {name!r} has {offsets[-1]} rows on rank {rank}; the limit is {MAX_INDEX}"
                    )

    def _derived(self, space: Row, rank: int) -> list[int]:
        parent, team = self.sizes[space.parent], self.tables.team(space)
        place, members = team.place(rank), team.members(rank)
        if space.route == SCATTER:
            first = place * space.groups
            return [sum(parent[source][first + group] for source in members) for group in range(space.groups)]
        if space.route == ALL:
            return [size for source in members for size in parent[source]]
        return list(parent[members[(place - space.shift) % team.ranks]])

    def total(self, space: int, rank: int) -> int:
        return self.offsets[space][rank][-1]

    def whole_groups(self, space: int, rank: int, row: int, rows: int) -> tuple[int, int]:
        """The first row and the number of rows of all groups that some rows lie in."""
        offsets = self.offsets[space][rank]
        met = [(begin, end) for begin, end in pairwise(offsets) if max(begin, row) < min(end, row + rows)]
        return (met[0][0], met[-1][1] - met[0][0]) if met else (row, rows)

    def tensor_rows(self, tensor: int, rank: int) -> int:
        row = self.tables.tensors[tensor]
        return row.rows if row.space < 0 else self.total(row.space, rank)

    def tensor_records(self, rank: int) -> Records:
        """A plan's tensors section, for this rank."""
        offsets = {ROLES["workspace"]: 0, ROLES["symmetric"]: 0}
        records = np.zeros(len(self.tables.tensors), TENSOR)
        for index, (record, tensor) in enumerate(zip(records, self.tables.tensors, strict=True)):
            rows = self.tensor_rows(index, rank)
            record["dtype"], record["role"], record["storage"] = tensor.dtype, tensor.role, tensor.storage
            record["rows"], record["cols"] = rows, tensor.cols
            if tensor.role == ROLES["symmetric"]:  # the same offsets on every rank: room for the rank with most rows
                rows = max(self.tensor_rows(index, other) for other in range(self.tables.ranks))
            record["most_rows"] = rows
            size = rows * tensor.cols * tensor.item_bytes
            after = offsets.get(tensor.role, 0) + -(-size // ALIGNMENT) * ALIGNMENT
            if after > MAX_BYTES:
                raise PlanLimitError(
                    f"tensor {self.tables.tensor_names[index]!r} takes {size} bytes, and those of its kind together "
                    f"{after}; the limit is {MAX_BYTES}"
                )
            if tensor.role in offsets:
                if tensor.storage == index:
                    record["offset"] = offsets[tensor.role]
                    offsets[tensor.role] = after
                else:
                    record["offset"] = records[tensor.storage]["offset"]
        return records

    def _arrival(self, space: int, rank: int, group: int, source: int) -> int:
        """The first row, in a scattered space on `rank`, of the rows of local `group` that came from `source`."""
        row = self.tables.spaces[space]
        parent, team = self.sizes[row.parent], self.tables.team(row)
        expert = team.place(rank) * row.groups + group
        earlier = sum(parent[other][expert] for other in team.members(rank) if other < source)
        return self.offsets[space][rank][group] + earlier

    def segments(self, op: Row, source: int, target: int) -> Iterator[Segment]:
        """What `source` puts to `target` in this op, in order of the received group; empty segments left out."""
        for segment in self._segments(op, source, target):
            if segment.rows:
                yield segment

    def _segments(self, op: Row, source: int, target: int) -> Iterator[Segment]:
        sent, received = (self.tables.tensors[box.tensor].space for box in self.tables.boxes(op))
        spaces, team = self.tables.spaces, self.tables.team(op)
        if target not in team.members(source):
            return
        if op.route == SCATTER:
            owned = spaces[received].groups
            for group in range(owned):
                expert = team.place(target) * owned + group
                rows = self.sizes[sent][source][expert]
                landing = self._arrival(received, target, group, source)
                yield Segment(self.offsets[sent][source][expert], landing, rows, group)
        elif op.route == RETURN:
            owned = spaces[sent].groups
            for group in range(owned):
                expert = team.place(source) * owned + group
                rows = self.sizes[received][target][expert]
                leaving = self._arrival(sent, source, group, target)
                yield Segment(leaving, self.offsets[received][target][expert], rows, expert)
        elif op.route == ALL:
            groups = spaces[sent].groups
            for group in range(groups):
                landing = team.place(source) * groups + group
                rows = self.sizes[sent][source][group]
                yield Segment(self.offsets[sent][source][group], self.offsets[received][target][landing], rows, landing)
        elif team.place(target) == (team.place(source) + op.shift) % team.ranks:
            for group in range(spaces[sent].groups):
                start = self.offsets[sent][source][group]
                yield Segment(start, start, self.sizes[sent][source][group], group)
