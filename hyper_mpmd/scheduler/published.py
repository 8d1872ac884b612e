"""The tiles of the published design: communication and vector tiles of 128 rows, and a task a cube core for the product
of each expert (the design's multicore guide). Other policies choose tiles by cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler.descriptor import OP_COLUMNS, PLAIN, SPACE, SPACE_COLUMNS, Descriptor
from hyper_mpmd.scheduler.device import Device
from hyper_mpmd.scheduler.records import AIC, MAX_INDEX, ROUTES

ROWS = 128


def published_tiles(
    descriptor: Descriptor, counts: Mapping[int, NDArray[np.int64]], device: Device
) -> dict[int, tuple[int, int]]:
    """(rows, columns) of each op's tiles. counts: by number of a free row space, [ranks, groups].

    A product of mean height is cut in as many tiles as there are cube cores, as square as their number allows; under
    skew a larger group has more tiles, a smaller one fewer.
    """
    found = {}
    for index, values in enumerate(descriptor.ops.tolist()):
        op = dict(zip(OP_COLUMNS, values, strict=True))
        if op["kind"] != AIC:
            found[index] = (ROWS if op["cut_rows"] else MAX_INDEX, MAX_INDEX)
            continue
        rows = op["rows_value"] if op["rows_kind"] == PLAIN else 1
        if op["rows_kind"] == SPACE:
            rows = _mean_rows(descriptor, counts, op["rows_value"], bool(op["by_group"]))
        down, across = _cut(device.aic, rows, op["cols_value"])
        found[index] = (
            -(-rows // down) if op["cut_rows"] else MAX_INDEX,
            -(-op["cols_value"] // across) if op["cut_cols"] else MAX_INDEX,
        )
    return found


def _cut(cores: int, rows: int, cols: int) -> tuple[int, int]:
    """How many tiles down and across make one a core, with the least rim."""
    pairs = [(down, cores // down) for down in range(1, cores + 1) if cores % down == 0]
    return min(pairs, key=lambda pair: (rows / pair[0] + cols / pair[1], pair))


def _mean_rows(descriptor: Descriptor, counts: Mapping[int, NDArray[np.int64]], space: int, by_group: bool) -> int:
    """Rows of a group, or of the whole space on a rank, on average; at least 1."""
    parts = descriptor.ranks * (int(descriptor.spaces[space][SPACE_COLUMNS.index("groups")]) if by_group else 1)
    return max(1, -(-_all_rows(descriptor, counts, space) // parts))


def _all_rows(descriptor: Descriptor, counts: Mapping[int, NDArray[np.int64]], space: int) -> int:
    """Rows of the space on all ranks."""
    row = dict(zip(SPACE_COLUMNS, descriptor.spaces[space].tolist(), strict=True))
    if row["route"] == 0:
        return int(counts[space].sum())
    rows = _all_rows(descriptor, counts, row["parent"])
    return rows * row["team"] if row["route"] == ROUTES["all"] else rows
