"""MegaMoeExperts under autograd: a forward plan that keeps what the backward plan takes, and the backward plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hyper_mpmd.modules.mega_exchange import Met
from hyper_mpmd.modules.mega_execution import Execution
from hyper_mpmd.modules.mega_route import DTYPES, Call
from hyper_mpmd.modules.moe_inputs import by_routed_row, places_of
from hyper_mpmd.modules.tensor_parallel import share_rows


@dataclass(frozen=True)
class Step:
    """One forward and its backward: the resources, what the ranks agreed on, and the routing of this rank."""

    execution: Execution
    met: Met
    gather: torch.Tensor
    back: torch.Tensor
    shares: torch.Tensor
    dtype: str

    @classmethod
    def of(cls, execution: Execution, met: Met, call: Call) -> Step:
        shares = torch.from_numpy(share_rows(call.tokens, execution.config.tp_size, execution.place))
        return cls(execution, met, call.gather, call.back, shares, DTYPES[call.hidden.dtype])

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plans = self.execution.plans
        assert plans is not None
        plan = plans.forward(self.dtype, bool(self.met.wanted), self.met.tokens, self.met.counts)
        return self.execution.run(plan, {**self._indices(), **tensors})

    def backward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plans = self.execution.plans
        assert plans is not None
        plan = plans.backward(self.dtype, self.met.wanted, self.met.tokens, self.met.counts)
        places = places_of(self.back, self.execution.config.tp_size)
        return self.execution.run(plan, {**self._indices(), "places": places, **tensors})

    def _indices(self) -> dict[str, torch.Tensor]:
        return {"gather": self.gather, "back": self.back, "shares": self.shares}


class ExpertsFunction(torch.autograd.Function):
    """y = experts(hidden [T, H], weights [T, K], w1, w2) under a Step."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, hidden: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        scores = weights.detach().float().contiguous()
        made = step.forward({"x": hidden.contiguous(), "weights": scores, "w1": w1.contiguous(), "w2": w2.contiguous()})
        wanted = step.met.wanted
        if wanted:
            ctx.step = step
            ctx.weights_dtype = weights.dtype
            ctx.save_for_backward(
                by_routed_row(scores, step.back),
                made["gate_up"],
                made["received"] if "dw1" in wanted else None,
                w1 if "dx" in wanted else None,
                w2 if wanted != {"dw2"} else None,
            )
        return made["y"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step: Step = ctx.step
        scores, gate_up, received, w1, w2 = ctx.saved_tensors
        tensors = {"dy": dy.contiguous(), "scores": scores, "gate_up": gate_up, "received": received}
        tensors["w1"] = None if w1 is None else w1.detach().contiguous()
        tensors["w2"] = None if w2 is None else w2.detach().contiguous()
        with step.execution.claim():
            made = step.backward(tensors)
        _, dx, dweights, dw1, dw2 = ctx.needs_input_grad
        return (
            None,
            made["dx"] if dx else None,
            made["dweights"].view(step.back.shape).to(ctx.weights_dtype) if dweights else None,
            made["dw1"] if dw1 else None,
            made["dw2"] if dw2 else None,
        )
