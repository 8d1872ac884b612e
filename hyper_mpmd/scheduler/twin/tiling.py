"""What a tile costs, and which tile sizes an op gets. Exact integers throughout."""

from __future__ import annotations

from typing import NamedTuple

from hyper_mpmd.errors import PlanLimitError
from hyper_mpmd.scheduler.descriptor import SPACE
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.records import AIC, DTYPES, MAX_TIME, MAX_WORK
from hyper_mpmd.scheduler.twin.layout import Layout, Row, Tables

# Cuts fall on these multiples, so that rows fill SIMD blocks and columns fill cache lines.
ROW_UNIT, COL_UNIT = 8, 16
# Where other work fills the cores while an op's last tiles run, so large a part of the largest tile counts: 1 / 8.
HIDDEN_TAIL = 8


class Slab(NamedTuple):
    """The rows of one group that an op is cut in: [begin, begin + rows), and the length of its reduction."""

    group: int
    begin: int
    rows: int
    reduction_begin: int
    reduction: int


def even_cut(extent: int, tile: int, unit: int) -> int:
    """The tile size <= tile that cuts `extent` most evenly: 130 rows at 128 become 72 + 58, not 128 + 2."""
    if extent <= tile:
        return extent
    count = -(-extent // tile)
    size = -(-extent // count)
    return -(-size // unit) * unit if tile % unit == 0 else size


def slabs(tables: Tables, layout: Layout, op: Row, rank: int) -> list[Slab]:
    """The row intervals that the op works through on this rank, empty ones left out."""
    found = []
    for group in range(op.groups if op.by_group else 1):
        begin, rows = _interval(layout, op, op.rows_kind, op.rows_value, rank, group)
        reduction_begin, reduction = _interval(layout, op, op.reduction_kind, op.reduction_value, rank, group)
        if rows:
            found.append(Slab(group, begin, rows, reduction_begin, reduction))
    return found


def _interval(layout: Layout, op: Row, kind: int, value: int, rank: int, group: int) -> tuple[int, int]:
    if kind != SPACE:
        return 0, value  # an absent axis has extent 1
    offsets = layout.offsets[value][rank]
    if op.by_group:
        return offsets[group], offsets[group + 1] - offsets[group]
    return 0, offsets[-1]


def moved_bytes(tables: Tables, device: Device, op: Row, rows: int, cols: int, reduction: int) -> int:
    """What a tile reads and writes."""
    moved = 0
    for box in tables.boxes(op):
        tensor = tables.tensors[box.tensor]
        # Rows chosen by data: a tile reads as many as it has (times the reduction), not the whole tensor.
        chosen = tensor.block_rows if box.group else rows * reduction
        high = (chosen, rows, cols, reduction)[box.rows_axis]
        wide = (tensor.cols, rows, cols, reduction)[box.cols_axis]
        moved += high * (wide * tensor.item_bytes + (device.row_bytes if wide < tensor.cols else 0))
    return moved


def tile_cost(tables: Tables, device: Device, op: Row, rows: int, cols: int, reduction: int) -> int:
    """Nanoseconds of a tile on one core: the larger of arithmetic and memory time, and the task's overhead."""
    moved = moved_bytes(tables, device, op, rows, cols, reduction)
    ramp_rows, ramp_cols = device.cube_ramp if op.kind == AIC else device.vector_ramp
    flops = op.flops_per_point * (rows + ramp_rows) * (cols + ramp_cols) * reduction
    for amount, what in ((flops, "does more than {} operations"), (moved, "moves more than {} bytes")):
        if amount > MAX_WORK:
            raise PlanLimitError(
                f"task {_name(tables, op)!r}: a tile of {rows} x {cols} over {reduction} {what.format(MAX_WORK)}"
            )
    if op.route:
        return device.task_ns + moved // 2 * 1000 // device.link_bytes_per_us
    half = int(op.dtype in (DTYPES["bfloat16"], DTYPES["float16"]))
    rates, bytes_per_us = (
        (device.cube_flops_per_us, device.cube_bytes_per_us)
        if op.kind == AIC
        else (device.vector_flops_per_us, device.vector_bytes_per_us)
    )
    return device.task_ns + max(flops * 1000 // rates[half], moved * 1000 // bytes_per_us)


def streamed_cost(tables: Tables, device: Device, op: Row, rows: int, cols: int, reduction: int) -> int:
    """The same where all cores are at such tiles: what does not fit into the L2 comes from main memory, which they
    share."""
    alone = tile_cost(tables, device, op, rows, cols, reduction)
    missed = moved_bytes(tables, device, op, rows, cols, reduction) - device.l2_bytes
    if op.route or missed <= 0:
        return alone
    return max(alone, min(missed * cores_of(device, op) * 1000 // device.memory_bytes_per_us, MAX_TIME))


def cores_of(device: Device, op: Row) -> int:
    return device.aic if op.kind == AIC else device.aiv


def _name(tables: Tables, op: Row) -> str:
    return tables.op_names[tables.ops.index(op)]


def choose_tiles(
    tables: Tables, layout: Layout, device: Device, given: dict[int, tuple[int, int]]
) -> list[tuple[int, int]]:
    """(rows, columns) of each op's tiles: what was given, else the cheapest over all ranks of the world.

    Cheapest: least of (sum of tile costs / cores + largest tile), on the rank where that is most; of the largest tile
    only a part where other work hides the op's tail. One choice for all ranks, from the whole counts matrix, so that
    ranks agree on each other's tiles without asking.
    """
    return [given.get(index) or _choose(tables, layout, device, op) for index, op in enumerate(tables.ops)]


def _choose(tables: Tables, layout: Layout, device: Device, op: Row) -> tuple[int, int]:
    cores = cores_of(device, op)
    tail = HIDDEN_TAIL if hidden_tail(tables, op) else 1
    work = [_work(tables, layout, op, rank) for rank in range(tables.ranks)]
    extent_cols = op.cols_value
    most_rows = max((slab.rows for slabs_ in work for slab in slabs_), default=1)
    row_tiles = device.row_tiles if op.cut_rows else (most_rows,)
    col_tiles = device.col_tiles if op.cut_cols else (extent_cols,)
    best: tuple[int, int, int] | None = None
    for tile_rows in row_tiles:
        for tile_cols in col_tiles:
            worst = max(
                _makespan(tables, device, op, slabs_, extent_cols, tile_rows, tile_cols, cores, tail) for slabs_ in work
            )
            if best is None or worst < best[0]:
                best = (worst, tile_rows, tile_cols)
    assert best is not None
    return best[1], best[2]


def hidden_tail(tables: Tables, op: Row) -> bool:
    """Whether other work fills the cores while the last tiles of the op run: that of ops that nothing waits for, which
    are left to the end. Nothing is to be gained where the op itself waits for rows that come in late."""
    if op.route:
        return False
    if not _is_read(tables, op):
        return True
    arriving = {tables.boxes(route)[1].tensor for route in tables.ops if route.route}
    if any(not box.write and box.tensor in arriving for box in tables.boxes(op)):
        return False
    return any(other.kind == op.kind and not other.route and not _is_read(tables, other) for other in tables.ops)


def _is_read(tables: Tables, op: Row) -> bool:
    written = {box.tensor for box in tables.boxes(op) if box.write}
    return any(not box.write and box.tensor in written for reader in tables.ops for box in tables.boxes(reader))


def _work(tables: Tables, layout: Layout, op: Row, rank: int) -> list[Slab]:
    """The slabs to be cut; for a communication op, the groups that the rank receives."""
    if not op.route:
        return slabs(tables, layout, op, rank)
    received = tables.tensors[tables.boxes(op)[1].tensor].space
    return [Slab(group, 0, rows, 0, 1) for group, rows in enumerate(layout.sizes[received][rank]) if rows]


def _makespan(
    tables: Tables,
    device: Device,
    op: Row,
    work: list[Slab],
    cols: int,
    tile_rows: int,
    tile_cols: int,
    cores: int,
    tail: int,
) -> int:
    width = even_cut(cols, tile_cols, COL_UNIT)
    total = largest = 0
    for slab in work:
        height = even_cut(slab.rows, tile_rows, ROW_UNIT)
        for high, down in _counts(slab.rows, height):
            for wide, across in _counts(cols, width):
                cost = streamed_cost(tables, device, op, high, wide, slab.reduction)
                total += cost * down * across
                largest = max(largest, cost)
    if total > MAX_TIME:
        raise PlanLimitError(f"task {_name(tables, op)!r}: its tiles take more than {MAX_TIME} ns together")
    return total // cores + largest // tail


def _counts(extent: int, size: int) -> list[tuple[int, int]]:
    """(size, how many) of the full tiles and of the rest."""
    full, rest = divmod(extent, size)
    return [(n, times) for n, times in ((size, full), (rest, 1)) if n and times]
