"""A feed-forward of eight experts, from a graph to numbers.

python examples/quickstart.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import hyper_mpmd as hm

g = hm.TaskGraph("ffn")
rows = g.rows("tokens", groups=8)  # rows grouped by expert; how many comes later, as loads
x = g.input("x", (rows, 1024))  # dtype="float32" unless said otherwise
w1 = g.input("w1", (8, 1024, 2 * 512))
w2 = g.input("w2", (8, 512, 1024))
h = g.cube("up", hm.ops.GroupedMatmul(), x, w1)
a = g.vector("act", hm.ops.SwiGLU(), h)
g.output("y", g.cube("down", hm.ops.GroupedMatmul(), a, w2))

loads = [128, 0, 37, 300, 1, 64, 64, 70]
plan = hm.compile(g, loads={"tokens": loads}, device="cpu", policy="O1")
print(plan.report())  # tasks by kind, events, queues, bytes, bound, predicted makespan

torch.manual_seed(0)
x_t = torch.randn(sum(loads), 1024)
w1_t = torch.randn(8, 1024, 2 * 512) / 1024**0.5
w2_t = torch.randn(8, 512, 1024) / 512**0.5
out = plan.run(x=x_t, w1=w1_t, w2=w2_t)  # dict of tensors; torch tensors in, torch tensors out

reference = plan.run(x=x_t, w1=w1_t, w2=w2_t, engine="reference")  # plain torch, one op after another
error = float((out["y"] - reference["y"]).abs().max() / reference["y"].abs().max())
print(f"\ny is {list(out['y'].shape)}; max relative error against plain torch {error:.1e}")
assert error < 1e-5, error

with TemporaryDirectory() as folder:
    file = Path(folder) / "ffn.plan.json"
    plan.save(file)
    assert hm.Plan.load(file) == plan
