"""What an op must declare: its core kind, tile rule, shapes, reference maths and kernel.

Built-in ops live in `hyper_mpmd.ops`, one file each; a user's own op is a subclass of `Op` in a file of theirs.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hyper_mpmd.errors import NameTakenError, OpParameterError, OpRuleError
from hyper_mpmd.tasks.rule import TileRule, check_rule
from hyper_mpmd.tasks.tensor import DType, RouteKind, Routing, Tensor

CoreKind = Literal["cube", "vector", "comm"]

_REGISTRY: dict[str, type[Op]] = {}


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of an output, before it has a name; the first dimension may be a row space's name."""

    shape: tuple[str | int, ...]
    dtype: DType


@dataclass(frozen=True)
class Layout:
    """Where the groups of the op's row space lie: group g holds rows offsets[g] to offsets[g + 1]."""

    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """The tile that a Python kernel is asked to compute: its task's name, number within the op, and group (0 where the
    op is not cut by group)."""

    task: str
    number: int
    group: int


class Op(BaseModel):
    """An op of the task graph. A subclass declares, as class variables and methods:

    core: "cube", "vector" or "comm": the core kind that runs its tiles.
    rule: its tile rule.
    inplace: {output: input} for outputs that overwrite an input's memory.
    shapes(inputs): the outputs' types, or a ShapeError, DTypeError or RowSpaceError that names the tensors.
    reference(layout, *inputs): the whole op in plain torch; one tensor, or a tuple of them.
    kernel(tile, *views): one tile, on torch views of its boxes: inputs' boxes first, then outputs', each in the order
    of the rule; it writes the output views in place. Ops with a native kernel name it in `native` instead.

    Parameters of an op are pydantic fields. Instances are frozen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    core: ClassVar[CoreKind]
    rule: ClassVar[TileRule]
    inplace: ClassVar[dict[int, int]] = {}
    if not TYPE_CHECKING:  # type checkers keep the signature that pydantic makes of the fields

        def __init__(self, /, **parameters: Any) -> None:
            try:
                super().__init__(**parameters)
            except ValidationError as error:
                first = error.errors()[0]
                where = f"{type(self).__name__}({'.'.join(map(str, first['loc']))}={first['input']!r})"
                raise OpParameterError(f"{where}: {first['msg']}") from None

    # The engine's own kernel for this op (a name in scheduler/records.py), or None for a Python kernel.
    native: ClassVar[str | None] = None

    def routing(self) -> Routing | tuple[RouteKind, int] | None:
        """Communication ops only: how rows travel between ranks, the shift of a shifted route, and the team."""
        return None

    def limits(self) -> float:
        """What the native kernel of a SwiGLU clamps its halves to; infinity: nothing."""
        return math.inf

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if getattr(cls, "core", None) is None:
            return  # an intermediate base class
        if cls.core not in ("cube", "vector", "comm"):
            raise OpRuleError(f"{cls.__name__}: core is {cls.core!r}; core kinds are cube, vector and comm")
        if getattr(cls, "rule", None) is None:
            raise OpRuleError(f"{cls.__name__} declares no tile rule (class variable `rule`)")
        check_rule(cls.__name__, cls.rule, cls.inplace)
        known = _REGISTRY.get(cls.__name__)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NameTakenError(
                f"op name {cls.__name__!r} is claimed by {known.__module__}.{known.__qualname__} and by "
                f"{cls.__module__}.{cls.__qualname__}; graphs name ops by their class name, so rename one"
            )
        _REGISTRY[cls.__name__] = cls

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[TensorType, ...]:
        raise OpRuleError(f"{type(self).__name__} does not say what shapes it makes: define shapes(inputs)")

    def reference(self, layout: Layout, *inputs: Any) -> Any:
        raise OpRuleError(f"{type(self).__name__} has no reference maths: define reference(layout, *inputs)")

    def kernel(self, tile: Tile, *views: Any) -> None:
        raise OpRuleError(f"{type(self).__name__} has no kernel: define kernel(tile, *views)")


def lookup_op(name: str) -> type[Op]:
    """The op class of that name. The module that defines a user's op must have been imported: loading runs no code."""
    if name not in _REGISTRY and "hyper_mpmd.ops" not in sys.modules:
        importlib.import_module("hyper_mpmd.ops")  # by name: tasks/ stands below ops/, which registers the built-ins
    try:
        return _REGISTRY[name]
    except KeyError:
        raise OpRuleError(
            f"no op is called {name!r}; known: {', '.join(sorted(_REGISTRY))}. If it is your own, import its "
            "module first"
        ) from None
