"""The records of native/include/hyper_mpmd/plan.h as numpy dtypes. A test compares every offset and constant."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PLAN_VERSION = 2
NONE = 0xFFFFFFFF
MAX_INDEX = 0xFFFFFFFE
MAX_THRESHOLD = 0x3FFFFFFF
MAX_RANKS = 4096
MAX_WORK = 1 << 52
MAX_TIME = 1 << 62
MAX_BYTES = 1 << 62
ALIGNMENT = 64
WORDS_PER_LINE = 16

AIC, AIV, BOTH = 0, 1, 2
CORE_KINDS = ("AIC", "AIV", "AIC+AIV")
KERNELS = {
    "nop": 0,
    "python": 1,
    "copy": 2,
    "permute": 3,
    "gemm": 4,
    "swiglu": 5,
    "unpermute": 6,
    "gemm_wt": 7,
    "gemm_xt": 8,
    "weighted_swiglu": 9,
    "swiglu_grad": 10,
    "gather_sum": 11,
}
ROLES = {"input": 0, "output": 1, "workspace": 2, "symmetric": 3}
DTYPES = {"float32": 0, "bfloat16": 1, "int32": 2, "int64": 3, "float16": 4}
ROUTES = {None: 0, "scatter": 1, "return": 2, "all": 3, "shift": 4}


def _words(*names: str) -> list[tuple[str, str]]:
    return [(name, "<u4") for name in names]


TASK = np.dtype(
    [
        *_words("op", "number", "group", "peer", "launch", "access_begin", "access_count", "wait_begin", "wait_count"),
        *_words("signal_begin", "signal_count", "cost_ns"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
ACCESS = np.dtype(_words("tensor", "rank", "row", "rows", "col", "cols"))
WAIT = np.dtype(_words("event", "threshold"))
SIGNAL = np.dtype(_words("rank", "event"))
EVENT = np.dtype(_words("threshold", "signaller", "slot", "op", "order", "tensor", "row", "rows", "col", "cols"))
QUEUE = np.dtype(_words("kind", "core", "begin", "count"))
LAUNCH = np.dtype(
    [*_words("op", "task_count", "dependency_begin", "dependency_count"), ("start_ns", "<i8"), ("end_ns", "<i8")]
)
OP = np.dtype(_words("kernel", "kind", "dtype", "read_count", "hop", "route", "limit_bits"))
TENSOR = np.dtype(
    [*_words("dtype", "role", "storage", "most_rows"), ("rows", "<u8"), ("cols", "<u8"), ("offset", "<u8")]
)
PEER = np.dtype(_words("credit_slot", "heap_words"))
DEPENDENCY = np.dtype("<u4")

# Where one core stood when a launch passed its deadline (engine.h, CoreRecord); no section of a plan.
CORE = np.dtype(
    [
        *_words("rank", "queue", "kind", "core", "worker", "state", "task", "event", "have", "need", "ended", "tasks"),
        ("launch", "<u8"),
        ("elapsed_ns", "<i8"),
    ]
)
CORE_STATES = ("done", "waiting", "running", "ready")

# The sections of a plan, in the order in which they are stored and hashed.
SECTIONS: dict[str, np.dtype[Any]] = {
    "ops": OP,
    "tensors": TENSOR,
    "tasks": TASK,
    "accesses": ACCESS,
    "waits": WAIT,
    "signals": SIGNAL,
    "events": EVENT,
    "queues": QUEUE,
    "launches": LAUNCH,
    "dependencies": DEPENDENCY,
    "peers": PEER,
}

Records = NDArray[np.void]
