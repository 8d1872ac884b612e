"""The reference engine: plain torch, one op after another, every rank in step. For comparison, never for speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hyper_mpmd.engine.bindings import tensor_shape
from hyper_mpmd.scheduler.descriptor import describe
from hyper_mpmd.scheduler.plan import Plan
from hyper_mpmd.scheduler.twin.layout import Layout as RowLayout
from hyper_mpmd.scheduler.twin.layout import Tables
from hyper_mpmd.tasks.check import row_space_of
from hyper_mpmd.tasks.op import Layout


def run_reference(plans: Sequence[Plan], inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Outputs by name of each rank, computed with each op's own reference maths."""
    graph = plans[0].graph
    descriptor = describe(graph)
    loads = {
        descriptor.space_names.index(name): np.array(counts, np.int64) for name, counts in plans[0].header.loads.items()
    }
    tables = Tables.of(descriptor)
    layout = RowLayout(tables, loads)
    values: list[dict[str, torch.Tensor]] = [
        {name: tensor.detach() for name, tensor in given.items()} for given in inputs
    ]
    with torch.no_grad():
        for index, node in enumerate(graph.nodes):
            if node.op.routing() is not None and len(plans) > 1:
                _move_rows(plans, layout, tables, index, values)
                continue
            touched = ([graph.tensors[name] for name in names] for names in (node.inputs, node.outputs))
            space = row_space_of(node.op, *touched)
            for rank, own in enumerate(values):
                offsets = () if space is None else tuple(layout.offsets[descriptor.space_names.index(space)][rank])
                result = node.op.reference(Layout(offsets), *(own[name] for name in node.inputs))
                results = result if isinstance(result, tuple) else (result,)
                own.update(zip(node.outputs, results, strict=True))
    return [{output: own[name].clone() for output, name in graph.outputs.items()} for own in values]


def _move_rows(
    plans: Sequence[Plan], layout: RowLayout, tables: Tables, index: int, values: list[dict[str, torch.Tensor]]
) -> None:
    node = plans[0].graph.nodes[index]
    (source_name,), (target_name,) = node.inputs, node.outputs
    for plan, own in zip(plans, values, strict=True):
        own[target_name] = own[source_name].new_zeros(tensor_shape(plan, target_name))
    for source in range(len(plans)):
        for target in range(len(plans)):
            for segment in layout.segments(tables.ops[index], source, target):
                rows = values[source][source_name][segment.source_row : segment.source_row + segment.rows]
                values[target][target_name][segment.target_row : segment.target_row + segment.rows] = rows
