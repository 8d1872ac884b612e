"""Rendezvous at a TCP endpoint, for ranks without a process group: rank 0 listens, the others come to it.

Only JSON of bounded size is read, so whoever else reaches the port can at worst be turned away.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from urllib.parse import urlsplit

from hyper_mpmd import _native
from hyper_mpmd.shmem.errors import PeerLost, RendezvousError, RendezvousTimeout, ShmemValueError
from hyper_mpmd.shmem.rendezvous import Message, Watch

_LENGTH = struct.Struct("!I")
_LONGEST_MESSAGE = 1 << 20
_SLICE_SEC = 0.05
_SETTLE_SEC = 0.3
_PROTOCOL = "hyper_mpmd shmem 1"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; ShmemValueError when it is not of that form."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme != "tcp" or not host or not port or parts.path or parts.query or parts.username:
        raise ShmemValueError(f"endpoint {endpoint!r} is not of the form tcp://host:port")
    return host, port


class _Line:
    """One connection and what has come on it so far."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.received = bytearray()
        self.identity: tuple[int, int] | None = None
        self.ended = False

    def send(self, message: object, deadline: float) -> None:
        text = json.dumps(message).encode()
        self.socket.settimeout(max(0.01, deadline - time.monotonic()))
        self.socket.sendall(_LENGTH.pack(len(text)) + text)
        self.socket.setblocking(False)

    def take(self) -> object | None:
        """The next whole message, or None. Sets `ended` when no more can come. ValueError for what is no message."""
        try:
            while part := self.socket.recv(65536):
                self.received += part
                if len(self.received) > _LONGEST_MESSAGE:
                    raise ValueError("too long")
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        if len(self.received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.received)
        if length > _LONGEST_MESSAGE:
            raise ValueError("too long")
        end = _LENGTH.size + length
        if len(self.received) < end:
            return None
        message: object = json.loads(bytes(self.received[_LENGTH.size : end]))
        del self.received[:end]
        return message


class EndpointExchange:
    """`world` ranks at one endpoint. Construction returns once this rank has its line to rank 0 (rank 0: to all)."""

    def __init__(self, endpoint: str, rank: int, world: int, deadline: float) -> None:
        self.rank = rank
        self.world = world
        self._endpoint = endpoint
        self._lines: dict[int, _Line] = {}
        self._strangers: list[_Line] = []
        host, port = parse_endpoint(endpoint)
        try:
            if rank == 0:
                self._gather(host, port, deadline)
            else:
                self._call(host, port, deadline)
        except BaseException:
            self.close()
            raise

    def settle(self, lost: int, text: str) -> tuple[int, str]:
        """Rank 0 tells what it found; the others take its last words, if it has said any."""
        if self.rank == 0:
            self._tell_all({"failure": text, "lost": lost})
        else:
            with contextlib.suppress(ValueError):
                last = self._lines[0].take()
                if isinstance(last, dict) and isinstance(last.get("lost"), int):
                    return last["lost"], str(last["failure"])
        return lost, text

    def close(self) -> None:
        for line in [*self._lines.values(), *self._strangers]:
            line.socket.close()
        self._lines.clear()
        self._strangers.clear()

    def all(self, message: Message, deadline: float, watch: Watch) -> list[Message]:
        if self.rank != 0:
            line = self._lines[0]
            self._send(0, message, deadline)
            reply = self._await(0, line, deadline, watch, "rank 0's answer")
            if isinstance(reply, dict) and "failure" in reply:
                raise self._failure(reply)
            if not isinstance(reply, list) or len(reply) != self.world:
                raise RendezvousError(f"rank 0 at {self._endpoint} answered what is no answer")
            return reply
        messages: list[Message] = [message]
        try:
            for peer in range(1, self.world):
                got = self._await(peer, self._lines[peer], deadline, watch, f"rank {peer}'s words")
                if not isinstance(got, dict):
                    raise RendezvousError(f"rank {peer} sent what is no message")
                messages.append(got)
        except RendezvousError as error:
            self._tell_all({"failure": str(error)})
            raise
        except PeerLost as error:
            self._tell_all({"failure": str(error), "lost": error.rank})
            raise
        for peer in range(1, self.world):
            self._send(peer, messages, deadline)
        return messages

    # Coming together ------------------------------------------------------------------------------------------------

    def _gather(self, host: str, port: int, deadline: float) -> None:
        try:
            listener = socket.create_server((host, port), family=_family(host), backlog=self.world, reuse_port=False)
        except OSError as error:
            raise RendezvousError(f"rank 0 cannot listen at {self._endpoint}: {error}") from error
        with listener:
            listener.setblocking(False)
            while len(self._lines) < self.world - 1:
                watched = [listener, *(line.socket for line in [*self._strangers, *self._lines.values()])]
                readable, _, _ = select.select(watched, [], [], _SLICE_SEC)
                if listener in readable:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        self._strangers.append(_Line(listener.accept()[0]))
                for line in list(self._strangers):
                    self._greet(line, deadline)
                for peer, line in self._lines.items():
                    self._check_line(peer, line)
                if time.monotonic() > deadline:
                    absent = [rank for rank in range(1, self.world) if rank not in self._lines]
                    text = f"rank(s) {absent} did not come to {self._endpoint} in time"
                    self._tell_all({"failure": text})
                    raise RendezvousTimeout(text)
        for line in self._strangers:
            line.socket.close()
        self._strangers.clear()

    def _greet(self, line: _Line, deadline: float) -> None:
        try:
            hello = line.take()
        except ValueError:
            hello = {}
        if hello is None and not line.ended:
            return
        self._strangers.remove(line)
        if not isinstance(hello, dict) or hello.get("protocol") != _PROTOCOL:
            line.socket.close()
            return
        rank, world = hello.get("rank"), hello.get("world")
        problem = None
        if world != self.world:
            problem = f"rank {rank} came to {self._endpoint} for a world of {world}, rank 0 for one of {self.world}"
        elif not isinstance(rank, int) or not 0 < rank < self.world or rank in self._lines:
            problem = f"two processes came to {self._endpoint} as rank {rank}"
        if problem is not None:
            with contextlib.suppress(OSError):
                line.send({"failure": problem}, deadline)
            line.socket.close()
            self._tell_all({"failure": problem})
            raise RendezvousError(problem)
        assert isinstance(rank, int)
        line.identity = (int(hello["pid"]), int(hello["start"]))
        self._lines[rank] = line
        self._send(rank, _hello(0, self.world), deadline)

    def _call(self, host: str, port: int, deadline: float) -> None:
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RendezvousTimeout(
                        f"rank 0 did not listen at {self._endpoint} in time, the last try said: {error}"
                    ) from error
                time.sleep(_SLICE_SEC)
        line = self._lines[0] = _Line(connection)
        self._send(0, _hello(self.rank, self.world), deadline)
        answer = self._await(0, line, deadline, lambda: None, "rank 0's greeting")
        if isinstance(answer, dict) and "failure" in answer:
            raise self._failure(answer)
        if not isinstance(answer, dict) or answer.get("protocol") != _PROTOCOL:
            raise RendezvousError(f"what listens at {self._endpoint} is not rank 0 of hyper_mpmd")
        line.identity = (int(answer["pid"]), int(answer["start"]))

    # One line -------------------------------------------------------------------------------------------------------

    def _send(self, peer: int, message: object, deadline: float) -> None:
        line = self._lines[peer]
        try:
            line.send(message, deadline)
        except OSError as error:
            # What the peer said before it hung up says more than the broken pipe.
            with contextlib.suppress(ValueError):
                last = line.take()
                if isinstance(last, dict) and "failure" in last:
                    raise self._failure(last) from error
            self._check_line(peer, line)
            raise RendezvousError(f"the line to rank {peer} broke: {error}") from error

    def _await(self, peer: int, line: _Line, deadline: float, watch: Watch, what: str) -> object:
        while True:
            gone: RendezvousError | PeerLost | None = None
            try:
                self._check_line(peer, line)
            except (RendezvousError, PeerLost) as error:
                gone = error
            # Read after that check: who spoke its last word and went has been heard.
            try:
                message = line.take()
            except ValueError as error:
                raise RendezvousError(f"rank {peer} at {self._endpoint} sent what is no message") from error
            if message is not None:
                return message
            if gone is not None:
                raise gone
            watch()
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"rank {self.rank} waited in vain for {what} at {self._endpoint}")
            select.select([line.socket], [], [], _SLICE_SEC)

    def _check_line(self, peer: int, line: _Line) -> None:
        # By process first: a child that a dead rank forked keeps its socket open.
        if line.identity is not None:
            # A dying process closes its sockets a little before it counts as ended.
            settled = time.monotonic() + (_SETTLE_SEC if line.ended else 0)
            while _native.process_alive(*line.identity) and time.monotonic() < settled:
                time.sleep(0.005)
            if not _native.process_alive(*line.identity):
                pid = line.identity[0]
                raise PeerLost(f"rank {peer} is lost: its process {pid} ended while ranks met in acquire()", peer, peer)
        if line.ended:
            raise RendezvousError(f"rank {peer} left while ranks met in acquire()")

    def _tell_all(self, message: Message) -> None:
        soon = time.monotonic() + 1.0
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(message, soon)

    def _failure(self, reply: Message) -> RendezvousError | PeerLost:
        text = str(reply["failure"])
        lost = reply.get("lost")
        return PeerLost(text, lost, lost) if isinstance(lost, int) else RendezvousError(text)


def _hello(rank: int, world: int) -> Message:
    pid, start = _native.process_identity()
    return {"protocol": _PROTOCOL, "rank": rank, "world": world, "pid": pid, "start": start}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
