"""TileProgram: every op of a graph cut into tile tasks, with the boxes they touch and the events that order them.

Not yet on any core: `schedule` puts a program on a device. Programs can also be built by hand from arrays (benchmarks
and tests do), which is how work that no graph describes reaches the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyper_mpmd.scheduler.records import Records


@dataclass
class TileProgram:
    """The tile tasks of one rank, in program order (every edge leads to a later task).

    tasks: records with everything but launch, start and end. costs: nanoseconds of each task. local_events: how many of
    the events are of this rank; they come first. The other sections are as in a plan.
    """

    rank: int
    ranks: int
    ops: Records
    tensors: Records
    tasks: Records
    accesses: Records
    waits: Records
    signals: Records
    events: Records
    peers: Records
    costs: NDArray[np.int64]
    local_events: int
    tiles: NDArray[np.int64]  # [ops, 2]: rows and columns chosen for each op
