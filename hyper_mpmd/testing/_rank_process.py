"""What runs inside one rank of a pool: take a job, run it in a process group of its own, answer, again.

Apart from the pool so that a rank imports no more than it needs.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, not in __all__

# Every rank of a pool is on this machine.
HOST = "127.0.0.1"


def rank_main(
    rank: int,
    world_size: int,
    port: int,
    connection: multiprocessing.connection.Connection,
    stack_path: str,
    collective_timeout: float,
) -> None:
    """Serve jobs from `connection` until an empty message or the end of the starting process.

    A job is (number, sys.path, pickled call); the answer is (True, pickled result) or (False, pickled (text, pickled
    exception or None)). A first (True, None) says that the rank is up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the pool ends its ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore(HOST, port, is_master=False)
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send_bytes(pickle.dumps((True, pickle.dumps(None))))
        while message := _next_message(connection):
            number, path, call = pickle.loads(message)
            sys.path[:] = path  # test modules found since this process started
            _leave_group()
            timeout = datetime.timedelta(seconds=collective_timeout)
            prefix = PrefixStore(f"job{number}", store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size, timeout=timeout)
            torch.manual_seed(0)
            succeeded, answer = _run(call)
            with contextlib.suppress(OSError):
                connection.send_bytes(answer)
            if not succeeded:
                # Peers may be waiting for this rank in a collective: closing its connections makes them fail too.
                _leave_group()
                gc.collect()
    _leave_group()


def _next_message(connection: multiprocessing.connection.Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""


def _run(call: bytes) -> tuple[bool, bytes]:
    """The call's answer. A function of its own, so that nothing here keeps the frames of a failed call alive: they hold
    process groups, and a group closes its connections when the last reference goes."""
    try:
        function, args, kwargs = pickle.loads(call)
        return True, pickle.dumps((True, pickle.dumps(function(*args, **kwargs))))
    except BaseException as error:
        return False, pickle.dumps((False, pickle.dumps((traceback.format_exc(), _dump_error(error)))))


def _dump_error(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None


def _leave_group() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
