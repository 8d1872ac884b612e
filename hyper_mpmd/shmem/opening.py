"""How a heap is opened: two rounds of words around the mapping of memory, after which all ranks have it or none."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from hyper_mpmd import _native
from hyper_mpmd.shmem.config import (
    DEFAULT_ENDPOINT,
    DEFAULT_TIMEOUT_SEC,
    ENDPOINT,
    Config,
    apply_log_level,
    logger,
    needed_bytes,
    read_config,
    timeout_from,
)
from hyper_mpmd.shmem.endpoint import EndpointExchange
from hyper_mpmd.shmem.errors import (
    REFUSALS,
    HeapTooSmall,
    PeerLost,
    RendezvousError,
    RendezvousTimeout,
    ShmemError,
    ShmemValueError,
)
from hyper_mpmd.shmem.heap import SymmetricHeap
from hyper_mpmd.shmem.rendezvous import Exchange, GroupExchange, Message, SoloExchange

PROTOCOL = 1
_SLICE_SEC = 0.05
_LAST_WORDS_SEC = 2.0  # how long a rank that gives up tries to tell the others
_LONGEST_REASON = 1000


def open_heap(group: dist.ProcessGroup | None, members: tuple[int, ...]) -> SymmetricHeap:
    """A heap shared by all ranks of the group; on any error nothing of it is left on this rank."""
    config: Config | None = None
    refusal: ShmemError | None = None
    try:
        config = read_config()
        apply_log_level(config)
        timeout = config.timeout_sec
    except ShmemError as error:
        refusal = error
        timeout = _timeout_or_default()
    deadline = time.monotonic() + timeout
    exchange = _exchange(group, members, deadline)
    invitation: Any = None
    try:
        if config is not None:
            try:
                invitation = _invite(exchange, config)
            except ShmemError as error:
                refusal = error
        cards = _bring(exchange, invitation, refusal, deadline)
        _map_all(exchange, invitation, cards, members, deadline)
        assert config is not None
        local_ranks = max(exchange.world, _local_world_size())
        native = invitation.finish(local_ranks <= _native.usable_processors())
        return SymmetricHeap(native, members, config)
    except BaseException:
        if invitation is not None:
            invitation.abandon()
        raise
    finally:
        exchange.close()


def world_from_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE; (0, 1) where neither is set. ShmemValueError for what cannot be."""
    texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if texts == ("", ""):
        return 0, 1
    try:
        rank, world = map(int, texts)
    except ValueError:
        rank = world = -1
    if not 0 <= rank < world <= _native.SHMEM_MAX_RANKS:
        raise ShmemValueError(
            f"RANK={texts[0]!r} WORLD_SIZE={texts[1]!r}: without a process group both name this rank and the number of "
            f"ranks, 0 <= RANK < WORLD_SIZE <= {_native.SHMEM_MAX_RANKS}"
        )
    return rank, world


def _exchange(group: dist.ProcessGroup | None, members: tuple[int, ...], deadline: float) -> Exchange:
    if dist.is_initialized():
        whole = group or dist.group.WORLD
        assert whole is not None
        return GroupExchange(whole, members)
    rank, world = world_from_environment()
    if world == 1:
        return SoloExchange()
    return EndpointExchange(os.environ.get(ENDPOINT, "").strip() or DEFAULT_ENDPOINT, rank, world, deadline)


def _invite(exchange: Exchange, config: Config) -> Any:
    if exchange.world > _native.SHMEM_MAX_RANKS:
        raise ShmemValueError(f"a group of {exchange.world} ranks: at most {_native.SHMEM_MAX_RANKS} share one host")
    try:
        try:
            return _native.ShmemInvitation(exchange.rank, exchange.world, config.heap_bytes)
        except OSError as error:
            logger.info("no memfd (%s): an unnamed file instead", error)
            return _native.ShmemInvitation(exchange.rank, exchange.world, config.heap_bytes, unnamed_file=True)
    except (OSError, RuntimeError) as error:
        raise HeapTooSmall(f"the machine gave no heap of {config.heap_bytes} bytes: {error}") from error


def _bring(
    exchange: Exchange, invitation: Any, refusal: ShmemError | None, deadline: float
) -> list[tuple[int, int, int, str]]:
    """First round: every rank's card; or, on every rank alike, the first refusal or the first difference."""
    brought: Message = {"protocol": PROTOCOL, "round": 1}
    if refusal is not None:
        brought["refused"] = [type(refusal).__name__, str(refusal)[:_LONGEST_REASON]]
    else:
        brought["card"] = invitation.card
    while True:
        everyone = exchange.all(brought, deadline, lambda: None)
        # A process group pairs calls by their count. A rank whose earlier try timed out is one ahead: what the others
        # then take for its card is an old one, and they say so in the round that this rank takes for their first.
        if all(message.get("round") == 1 for message in everyone):
            break
    for peer, message in enumerate(everyone):
        if message.get("protocol") != PROTOCOL:
            raise RendezvousError(f"rank {peer} runs another version of hyper_mpmd.shmem than rank {exchange.rank}")
        if "refused" in message:
            name, text = message["refused"]
            raise REFUSALS.get(name, ShmemError)(f"rank {peer}: {text}") from refusal
    sizes = [message["card"][2] for message in everyone]
    for peer, size in enumerate(sizes):
        if size != sizes[0]:
            raise RendezvousError(
                f"heaps differ: rank 0 has {sizes[0]} bytes, rank {peer} has {size}; set the same "
                f"HYPER_PARALLEL_SHMEM_HEAP_SIZE on all ranks (registered modules need {needed_bytes()} bytes here)"
            )
    return [tuple(message["card"]) for message in everyone]


def _map_all(
    exchange: Exchange,
    invitation: Any,
    cards: list[tuple[int, int, int, str]],
    members: tuple[int, ...],
    deadline: float,
) -> None:
    """Maps every peer's memory; the second round then tells whether it worked for everyone."""

    def watch() -> None:
        for peer, (pid, start, *_) in enumerate(cards):
            if not _native.process_alive(pid, start):
                lost, text = exchange.settle(peer, f"rank {peer} is lost: its process {pid} ended in acquire()")
                raise PeerLost(text, lost, members[lost])

    verdict: Message = {"protocol": PROTOCOL, "round": 2}
    caught: BaseException | None = None
    try:
        invitation.expect(cards)
        while not invitation.progress(_SLICE_SEC):
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"the memory of rank(s) {invitation.missing()} did not come in time")
    except _native.ShmemConnectError as error:
        peer, dead, text = error.args
        if dead:
            lost, text = exchange.settle(peer, f"rank {peer} is lost: {text}")
            raise PeerLost(text, lost, members[lost]) from None
        verdict["failed"] = f"no way to the memory of rank {peer}: {text}"[:_LONGEST_REASON]
    except BaseException as error:
        verdict["failed"] = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        caught = error
        deadline = min(deadline, time.monotonic() + _LAST_WORDS_SEC)
    try:
        verdicts = exchange.all(verdict, deadline, watch)
    except (RendezvousError, PeerLost):
        if caught is not None:
            raise caught from None
        raise
    if caught is not None:
        raise caught
    for peer, each in enumerate(verdicts):
        if each.get("round") != 2:
            raise RendezvousError(f"rank {peer} gave up an earlier acquire() and has begun a new one: try again")
        if "failed" in each:
            raise RendezvousError(f"rank {peer} could not join: {each['failed']}")


def _timeout_or_default() -> float:
    try:
        return timeout_from(os.environ)
    except ShmemError:
        return DEFAULT_TIMEOUT_SEC


def _local_world_size() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1
