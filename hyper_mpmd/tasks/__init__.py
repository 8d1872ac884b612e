"""What is to be done: graphs of typed tasks, tensors, row spaces, and what an op declares."""

from hyper_mpmd.tasks.graph import Node, TaskGraph
from hyper_mpmd.tasks.op import CoreKind, Layout, Op, TensorType, Tile
from hyper_mpmd.tasks.rule import Access, TileRule
from hyper_mpmd.tasks.team import Team
from hyper_mpmd.tasks.tensor import DispatchMode, DType, Route, Routing, RowSpace, Tensor

__all__ = [
    "Access",
    "CoreKind",
    "DType",
    "DispatchMode",
    "Layout",
    "Node",
    "Op",
    "Route",
    "Routing",
    "RowSpace",
    "TaskGraph",
    "Team",
    "Tensor",
    "TensorType",
    "Tile",
    "TileRule",
]
