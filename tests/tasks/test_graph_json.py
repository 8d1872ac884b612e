"""Graphs go to JSON and come back equal, through the same checks as when they were written by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_mpmd as hm
from hyper_mpmd import errors
from hyper_mpmd.testing.graphs import graphs


@given(graph=st.integers(1, 4).flatmap(lambda ranks: graphs(ranks=ranks)))
@settings(max_examples=100, deadline=None)
def test_graph_comes_back_equal(graph):
    again = hm.TaskGraph.from_json(graph.to_json())
    assert again == graph
    assert again.tensors == graph.tensors
    assert again.spaces == graph.spaces
    assert again.nodes == graph.nodes
    assert again.outputs == graph.outputs


def small() -> dict:
    g = hm.TaskGraph("ffn")
    rows = g.rows("tokens", groups=2)
    h = g.cube("up", hm.ops.GroupedMatmul(), g.input("x", (rows, 8)), g.input("w", (2, 8, 6)))
    g.output("y", g.vector("act", hm.ops.SwiGLU(), h))
    return json.loads(g.to_json())


def changed(**parts):
    return {**small(), **parts}


def task(index, **parts):
    record = small()
    record["tasks"][index].update(parts)
    return record


WRONG = {
    "not JSON": ("{", errors.GraphFormatError, "not a graph file"),
    "another format": (changed(format="hyper_mpmd.graph/9"), errors.GraphFormatError, "format"),
    "field that is not there": (changed(color="red"), errors.GraphFormatError, "color"),
    "shape of the wrong type": (changed(inputs=[{"name": "x", "shape": 3}]), errors.GraphFormatError, "inputs.0.shape"),
    "unknown op": (task(0, op={"name": "Conv"}), errors.OpRuleError, "no op is called 'Conv'; known: .*GroupedMatmul"),
    "unknown parameter": (task(1, op={"name": "SwiGLU", "beta": 2}), errors.GraphFormatError, "'act': SwiGLU\\(beta"),
    "unknown tensor": (task(1, inputs=["nope"]), errors.UnknownTensorError, "'act' uses tensor 'nope'"),
    "unknown row space": (
        changed(inputs=[{"name": "x", "shape": ["nope", 8]}]),
        errors.HyperMpmdError,
        "nope",
    ),
    "other outputs than it makes": (
        task(1, outputs=["b"]),
        errors.HyperMpmdError,
        "b",
    ),
    "output of nothing": (changed(outputs={"y": "nope"}), errors.UnknownTensorError, "output 'y'.*'nope'"),
    "circle": (task(0, inputs=["act", "w"]), errors.CycleError, "up waits for act waits for up"),
    "core kind": (task(0, core="vector"), errors.CoreKindError, "'up'.*cube op, added as vector"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused(name):
    record, kind, message = WRONG[name]
    text = record if isinstance(record, str) else json.dumps(record)
    with pytest.raises(kind, match=message):
        hm.TaskGraph.from_json(text)


def test_tasks_may_stand_in_any_order_in_a_file():
    record = small()
    record["tasks"].reverse()
    assert hm.TaskGraph.from_json(json.dumps(record)).to_json() == json.dumps(small(), separators=(",", ":"))
