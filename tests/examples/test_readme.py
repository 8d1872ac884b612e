"""The examples of the README run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_graph_runs_as_written(tmp_path, monkeypatch, capsys):
    code, _ = blocks()
    monkeypatch.chdir(tmp_path)
    names = {
        "x_t": torch.randn(664, 1024),
        "w1_t": torch.randn(8, 1024, 1024) / 32,
        "w2_t": torch.randn(8, 512, 1024) / 23,
    }
    exec(compile(code, str(README), "exec"), names)
    reference = names["plan"].run(x=names["x_t"], w1=names["w1_t"], w2=names["w2_t"], engine="reference")["y"]
    assert (names["out"]["y"] - reference).abs().max() <= 1e-5 * reference.abs().max()
    assert "predicted" in capsys.readouterr().out


def test_the_layer_runs_as_written():
    _, code = blocks()
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["output"].shape == (300, 256)
    assert names["hidden"].grad.abs().max() > 0
    assert names["experts"].gate_up_weight.grad.abs().max() > 0
