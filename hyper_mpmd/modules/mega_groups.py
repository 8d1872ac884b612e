"""Which ranks a layer runs over: those that share its experts out, times those that each expert is cut over.

A layer is given the process groups of both. Together they are a grid, and its plans run over all ranks of the grid,
place ep * TP + tp of it being (ep, tp): the ranks of one team stand side by side.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from hyper_mpmd.modules.mega_errors import MegaMoeTypeError, MegaMoeValueError
from hyper_mpmd.shmem.config import timeout_from

# Groups made for grids that no group was given of, by their ranks; each beside the world that it was made in.
_made: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}


class Grid:
    """The ranks of a layer, checked as far as one rank sees.

    ranks: global ranks in order of their places, ep_size * tp_size of them. ep_group, tp_group: None for all ranks, and
    for a layer that has no such group. Errors: MegaMoeValueError, MegaMoeTypeError.
    """

    def __init__(self, ep_size: int, ep_group: Any = None, tp_group: Any = None) -> None:
        self.ranks: tuple[int, ...] = ()
        self.ep_size, self.tp_size = ep_size, 1
        self.ep_group, self.tp_group = ep_group, tp_group
        if ep_size == 1 and ep_group is None and tp_group is None:
            return  # this process alone
        if not dist.is_available() or not dist.is_initialized():
            what = f"ep_size={ep_size}" if tp_group is None else "tp_group"
            raise MegaMoeValueError(f"{what} needs torch.distributed; call torch.distributed.init_process_group first")
        if ep_group is dist.group.WORLD:
            self.ep_group = None
        shards = (dist.get_rank(),) if tp_group is None else _members("tp_group", tp_group)
        self.tp_size = len(shards)
        experts = (dist.get_rank(),) if ep_size == 1 and ep_group is None else _members("ep_group", ep_group)
        if len(experts) != ep_size:
            which = "all ranks" if self.ep_group is None else "ep_group"
            fix = "; give the ep_group that goes with the tp_group" if self.tp_size > 1 and ep_group is None else ""
            raise MegaMoeValueError(f"ep_size={ep_size}, but {which} has {len(experts)} ranks{fix}")
        self.ranks = experts if self.tp_size == 1 else _grid(experts, shards)

    @property
    def spans_a_subgroup(self) -> bool:
        """Whether it needs process groups other than that of all ranks."""
        return self.tp_size > 1 or (self.ep_size > 1 and self.ep_group is not None)

    def group(self) -> dist.ProcessGroup | None:
        """The group of all its ranks; None for all ranks there are. Called by all of them, in the same order."""
        if self.tp_size == 1:
            return self.ep_group if self.ep_size > 1 else None
        if self.ranks == tuple(range(dist.get_world_size())):
            return None
        if self.ep_size == 1:
            return self.tp_group  # type: ignore[no-any-return]
        world, group = _made.get(self.ranks, (None, None))
        if group is None or world is not dist.group.WORLD:
            limit = timedelta(seconds=timeout_from(os.environ))
            group = dist.new_group(list(self.ranks), timeout=limit, use_local_synchronization=True)
            _made[self.ranks] = dist.group.WORLD, group
        return group

    def has_groups_of(self, other: Grid) -> bool:
        return self.ep_group is other.ep_group and self.tp_group is other.tp_group


def _members(name: str, group: Any) -> tuple[int, ...]:
    """Global ranks of a group (None: all) that this rank is a member of, in the group's order."""
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, (dist.ProcessGroup, int)):  # an int stands for a group of other ranks
        raise MegaMoeTypeError(f"{name} is a {type(group).__name__}; it must be a process group")
    if isinstance(group, int) or dist.get_rank(group) < 0:
        raise MegaMoeValueError(f"rank {dist.get_rank()} is not a member of {name}")
    return tuple(dist.get_process_group_ranks(group))


def _grid(experts: tuple[int, ...], shards: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks of the grid whose column and row through this rank these are."""
    mine = dist.get_rank()
    wide, far = _step(shards), _step(experts)
    if not wide or not far or (len(experts) > 1 and far < len(shards) * wide):
        raise MegaMoeValueError(
            f"rank {mine}: ep_group of {len(experts)} ranks {list(experts)} and tp_group of {len(shards)} ranks "
            f"{list(shards)} do not form a grid of {len(experts)} x {len(shards)} with the ranks of a tp_group side by "
            f"side; take both from init_device_mesh(..., ({len(experts)}, {len(shards)}), "
            'mesh_dim_names=("ep", "tp"))'
        )
    return tuple(expert + shard - mine for expert in experts for shard in shards)


def _step(ranks: tuple[int, ...]) -> int:
    """What one rank is past the one before; 0 where that is not the same all along, or not forwards."""
    steps = {after - before for before, after in pairwise(ranks)} or {1}
    return max(0, *steps) if len(steps) == 1 else 0
