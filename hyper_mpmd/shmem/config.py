"""What a life of the heap is configured by: the environment, read once at its first acquire, and modules' needs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hyper_mpmd import _native
from hyper_mpmd.shmem.errors import HeapTooSmall, ShmemValueError

HEAP_SIZE = "HYPER_PARALLEL_SHMEM_HEAP_SIZE"
ENDPOINT = "HYPER_PARALLEL_SHMEM_BOOTSTRAP_ENDPOINT"
TIMEOUT = "HYPER_PARALLEL_SHMEM_TIMEOUT_SEC"
DATA_ENGINE = "HYPER_PARALLEL_SHMEM_DATA_ENGINE"
LOG_LEVEL = "HYPER_PARALLEL_SHMEM_LOG_LEVEL"

DEFAULT_HEAP_BYTES = 1 << 30
DEFAULT_ENDPOINT = "tcp://127.0.0.1:8662"
DEFAULT_TIMEOUT_SEC = 120.0
LONGEST_TIMEOUT_SEC = 1e7
LOG_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.ERROR}

logger = logging.getLogger("hyper_mpmd.shmem")

# name of a module -> bytes of heap it will ask for
_needs: dict[str, int] = {}


@dataclass(frozen=True)
class Config:
    """One life's configuration, as `debug_state()` shows it."""

    heap_bytes: int
    heap_is_fixed: bool
    endpoint: str
    timeout_sec: float
    data_engine: str
    log_level: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def require(name: str, nbytes: int) -> None:
    """Tells how many bytes of heap the module `name` will allocate on each rank; counts from the next life on.

    A second call with the same name replaces the first, 0 withdraws it. The default heap holds all needs together; a
    heap fixed by HYPER_PARALLEL_SHMEM_HEAP_SIZE that does not is refused by `acquire`, with the size needed.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ShmemValueError(f"{name} needs {nbytes!r} bytes of heap: a count of bytes is an int of at least 0")
    if nbytes == 0:
        _needs.pop(name, None)
    else:
        _needs[name] = nbytes


def needed_bytes() -> int:
    """Bytes all registered modules need, each rounded up to a page, so that their alignments fit as well."""
    return sum((nbytes + 4095) // 4096 * 4096 for nbytes in _needs.values())


def timeout_from(environment: Mapping[str, str]) -> float:
    """Seconds of HYPER_PARALLEL_SHMEM_TIMEOUT_SEC; ShmemValueError names the value and what it may be."""
    text = environment.get(TIMEOUT, "").strip()
    if not text:
        return DEFAULT_TIMEOUT_SEC
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_SEC:
        raise ShmemValueError(f"{TIMEOUT}={text!r}: give seconds, more than 0 and at most {LONGEST_TIMEOUT_SEC:g}")
    return seconds


def read_config(environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of a life that begins now.

    Raises ShmemValueError for a value that cannot be, HeapTooSmall when a fixed heap does not hold what modules
    registered with `require`. Takes no resource.
    """
    env = os.environ if environment is None else environment
    needed = needed_bytes()
    text = env.get(HEAP_SIZE, "").strip()
    if text:
        heap_bytes = int(text) if text.isascii() and text.isdigit() else 0
        if not 0 < heap_bytes <= _native.SHMEM_MAX_HEAP_BYTES:
            raise ShmemValueError(
                f"{HEAP_SIZE}={text!r}: give the heap bytes of each process, 1 to {_native.SHMEM_MAX_HEAP_BYTES}"
            )
        if heap_bytes < needed:
            parts = ", ".join(f"{name} {nbytes}" for name, nbytes in sorted(_needs.items()))
            raise HeapTooSmall(
                f"{HEAP_SIZE}={heap_bytes} is too small: registered modules need {needed} bytes ({parts}); "
                f"set it to at least {needed}, or unset it"
            )
    else:
        heap_bytes = max(DEFAULT_HEAP_BYTES, needed)
    engine = env.get(DATA_ENGINE, "").strip().lower() or "mte"
    if not engine.isidentifier():
        raise ShmemValueError(f"{DATA_ENGINE}={engine!r}: give the name of a copy engine, such as mte")
    level = env.get(LOG_LEVEL, "").strip()
    return Config(
        heap_bytes=heap_bytes,
        heap_is_fixed=bool(text),
        endpoint=env.get(ENDPOINT, "").strip() or DEFAULT_ENDPOINT,
        timeout_sec=timeout_from(env),
        data_engine=engine,
        log_level=int(level) if level in LOG_LEVELS else 2,
    )


def apply_log_level(config: Config) -> None:
    """Sets the level of the logger `hyper_mpmd.shmem`: 0 debug, 1 info, 2 error."""
    logger.setLevel(LOG_LEVELS[str(config.log_level)])
