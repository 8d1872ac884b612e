"""`compile`: from a graph and this step's loads to a plan, or to a world of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hyper_mpmd.errors import GraphFormatError, TileSizeError, UnknownPolicyError, WorldSizeError
from hyper_mpmd.scheduler.backend import get_backend
from hyper_mpmd.scheduler.descriptor import OP_COLUMNS, Descriptor, describe
from hyper_mpmd.scheduler.device import Device, get_device
from hyper_mpmd.scheduler.loads import check_loads
from hyper_mpmd.scheduler.plan import Plan, PlanHeader
from hyper_mpmd.scheduler.policies import get_policy
from hyper_mpmd.scheduler.prove import prove_native, trust
from hyper_mpmd.scheduler.published import published_tiles
from hyper_mpmd.scheduler.records import MAX_INDEX, MAX_RANKS
from hyper_mpmd.scheduler.world import World
from hyper_mpmd.tasks.graph import TaskGraph


def compile(  # the word users expect, always written hm.compile
    graph: TaskGraph,
    loads: Mapping[str, Any] | Any | None = None,
    *,
    device: str | Device = "cpu",
    policy: str = "O1",
    world: int | None = None,
    rank: int | None = None,
    tiles: Mapping[str, tuple[int, int]] | None = None,
    backend: Literal["native", "python"] | None = None,
    prove: bool | Literal["certificate"] = True,
) -> Any:
    """Plan a graph for the rows that this step has.

    loads: see `check_loads`: {row space: counts [ranks, groups]}, shorter where there is one of a thing.
    device: a name or a Device. policy: "O0" (an op at a time, dispatched by the host), "O1" (sunk into the cores), or
    another of `hyper_mpmd.scheduler.policies`, or one without some of its parts ("O1-no-rotation").
    world: the number of ranks; gives a World, or with `rank` that rank's Plan. A graph for one rank gives a Plan.
    tiles: {task: (rows, columns)} instead of the sizes that the cost model would choose.
    backend: "native", or "python" (slow, needs no compiler); by default native where it is installed.
    prove: True proves that the plans neither hang nor race (see `hyper_mpmd.scheduler.prove`). "certificate" leaves it
    at what the engine checks of every plan: no circle, right signal counts, hop levels. False proves nothing, and then
    the engine proves the plan before it takes it. Without the native prover nothing is proven here: call `check`, which
    is slow then.

    Errors: GraphFormatError (not a graph), LoadsError, UnknownDeviceError, UnknownPolicyError, WorldSizeError,
    TileSizeError, PlanLimitError; PlanUnsafe if a plan made here does not hold, which is an error of this library.
    """
    if prove not in (True, False, "certificate"):
        raise UnknownPolicyError(f"prove is {prove!r}; it must be True, False or 'certificate'")
    if not isinstance(graph, TaskGraph):
        raise GraphFormatError(f"compile takes a TaskGraph; got a {type(graph).__name__}")
    get_policy(policy)  # refused before any work
    ranks = _check_world(graph, world, rank)
    target = get_device(device)
    counts = check_loads(graph, loads)
    descriptor = describe(graph)
    given = _check_tiles(descriptor, tiles or {})
    planner = get_backend(backend)
    wanted = range(ranks) if rank is None else [rank]
    by_space = {descriptor.space_names.index(name): n for name, n in counts.items()}
    if get_policy(policy).how == "strided":
        given = {**published_tiles(descriptor, by_space, target), **given}
    sections, sizes = planner.plan(descriptor, by_space, target, policy, wanted, given)
    loads_by_name = {name: n.tolist() for name, n in counts.items()}
    tiles_by_name = dict(zip(descriptor.op_names, map(tuple, sizes.tolist()), strict=True))
    plans = [
        # All of it was checked above or made here, so validation would only cost time: planning is done every step.
        Plan(
            PlanHeader.model_construct(
                graph=descriptor.graph_json,
                loads=loads_by_name,
                device=target,
                policy=policy,
                rank=member,
                ranks=ranks,
                tiles=tiles_by_name,
            ),
            records,
        )
        for member, records in zip(wanted, sections, strict=True)
    ]
    if prove is True:
        prove_native(plans)
    elif prove:
        for plan in plans:
            trust(plan)
    if rank is None and (ranks > 1 or world is not None):
        return World(plans)
    return plans[0]


def _check_world(graph: TaskGraph, world: int | None, rank: int | None) -> int:
    ranks = graph.ranks if world is None else world
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise WorldSizeError(f"world is {ranks!r}; it must be an int from 1 to {MAX_RANKS}")
    if ranks != graph.ranks:
        raise WorldSizeError(
            f"graph {graph.name!r} is written for {graph.ranks} rank(s), world is {world}; write TaskGraph(..., "
            f"ranks={world})"
        )
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks):
        raise WorldSizeError(f"rank is {rank!r}; a world of {ranks} has ranks 0 to {ranks - 1}")
    return ranks


def _check_tiles(descriptor: Descriptor, tiles: Mapping[str, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    if not isinstance(tiles, Mapping):
        raise TileSizeError(f"tiles are {tiles!r}; they must be a dict, task name: (rows, columns)")
    given = {}
    for name, size in tiles.items():
        if name not in descriptor.op_names:
            raise TileSizeError(f"tiles for {name!r}, but the tasks are {', '.join(descriptor.op_names)}")
        whole = isinstance(size, (tuple, list)) and len(size) == 2
        if not whole or any(isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MAX_INDEX for n in size):
            raise TileSizeError(
                f"tiles of {name!r} are {size!r}; they must be (rows, columns), ints from 1 to {MAX_INDEX}"
            )
        index = descriptor.op_names.index(name)
        rows, cols = size
        op = descriptor.ops[index]
        if not op[OP_COLUMNS.index("cut_rows")]:
            rows = MAX_INDEX
        if not op[OP_COLUMNS.index("cut_cols")]:
            cols = MAX_INDEX
        given[index] = (rows, cols)
    return given
