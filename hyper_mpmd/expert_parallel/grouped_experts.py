"""The experts of one MoE layer as three stacked weights, and the ways to run them.

A parallel style (ExpertParallel, TensorParallel, ExpertTensorParallel) turns the weights into DTensors and hangs a
runner on the module; the module then calls the runner, which calls `compute` with the rows that are this rank's, or
hands rows and weights to the fused engine. All of it happens inside `forward`, so FSDP, pipeline and checkpoint
wrappers around the module see one ordinary call.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError, check_size
from hyper_mpmd.expert_parallel.grouped_matmul import counts_error, group_ends, grouped_linear, missing_for
from hyper_mpmd.expert_parallel.permute import scale_rows

# (x [N, H] expert-major, num_tokens_per_expert, scores [N] or None) -> [N, H]
Compute = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class Runner(ABC):
    """How experts that are spread over ranks run."""

    @abstractmethod
    def __call__(
        self, experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """`GroupedExperts.forward` of these experts."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back what it holds between calls."""


_said: set[str] = set()


class GroupedExperts(nn.Module):
    """E SwiGLU experts, each on its own rows: w2(silu(w1 x) · w3 x).

    Args:
        dim: width H of input and output.
        hidden_dim: width I in between.
        num_experts: E, over all ranks.
        use_grouped_mm: one grouped matmul a weight (CUDA, CPU and NPU) in place of a loop over experts. Where there is
            none for the device, dtype or sizes, a warning says so once and the loop runs.

    Weights are w1 [E, I, H], w2 [E, H, I], w3 [E, I, H], each expert's slice initialised like an `nn.Linear` of its own
    fan-in. Afterwards `ep_mesh` and `tp_mesh` are the 1-D meshes that a parallel style has spread them over, or None.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = False) -> None:
        super().__init__()
        self.dim = check_size("dim", dim)
        self.hidden_dim = check_size("hidden_dim", hidden_dim)
        self.num_experts = check_size("num_experts", num_experts)
        self.use_grouped_mm = use_grouped_mm
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.ep_mesh: DeviceMesh | None = None
        self.tp_mesh: DeviceMesh | None = None
        self._runner: Runner | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(fan-in of one expert), as `nn.Linear` does.

        Works on spread weights too: each part draws its own numbers, and copies of a part the same ones, provided all
        ranks called `torch.manual_seed` with the same value.
        """
        for weight, fan_in in ((self.w1, self.dim), (self.w2, self.hidden_dim), (self.w3, self.dim)):
            bound = 1 / math.sqrt(fan_in)
            if isinstance(weight, DTensor):
                local = weight.to_local()
                local.uniform_(-bound, bound, generator=_generator_of_part(weight))
            else:
                weight.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"

    def forward(
        self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run every row through its expert.

        Args:
            x: [N, H], rows of expert 0 first, then those of expert 1, and so on. N may be 0.
            num_tokens_per_expert: [E] integers that add up to N.
            scores: [N], multiplied in fp32 onto the rows that come out, or None.

        Returns:
            [N, H] of x's dtype, rows in the order of x. All three weights get a gradient, exact zero for an expert
            without rows.
        """
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ExpertParallelError(f"x must be [N, {self.dim}], got {list(x.shape)}")
        if num_tokens_per_expert.shape != (self.num_experts,):
            raise ExpertParallelError(
                f"num_tokens_per_expert must be [{self.num_experts}], one a (global) expert, got "
                f"{list(num_tokens_per_expert.shape)}"
            )
        if num_tokens_per_expert.dtype not in (torch.int32, torch.int64):
            raise ExpertParallelTypeError(
                f"num_tokens_per_expert must be int32 or int64, got {num_tokens_per_expert.dtype}"
            )
        if scores is not None and scores.shape != x.shape[:1]:
            raise ExpertParallelError(f"scores must be [{x.shape[0]}], one a row of x, got {list(scores.shape)}")
        if self._runner is None:
            return self.compute(x, num_tokens_per_expert, scores)
        return self._runner(self, x, num_tokens_per_expert, scores)

    def close(self) -> None:
        """Give back the shared memory that `engine="mega"` holds: on all ranks, after the last backward, before the
        process group is destroyed. Without it the memory lasts until the process ends."""
        if self._runner is not None:
            self._runner.close()

    def local_weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's parts of w1, w2, w3, differentiable."""
        return _local(self.w1), _local(self.w2), _local(self.w3)

    def compute(
        self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, scores: torch.Tensor | None
    ) -> torch.Tensor:
        """`forward` on this rank's weights alone, without any communication: E is then the number of local experts, and
        under tensor parallelism the result is this rank's part of a sum."""
        dtype = self.compute_dtype(x)
        weights = tuple(weight.to(dtype) for weight in self.local_weights())
        inner = x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            if self._grouped_mm_can_run(inner, weights):
                ends = group_ends(num_tokens_per_expert, weights[0].shape[0], x.shape[0])
                out = self._run_experts_grouped_mm(inner, ends, *weights)
            else:
                out = self._run_experts_for_loop(inner, num_tokens_per_expert, *weights)
        out = out.to(x.dtype)
        return out if scores is None else scale_rows(out, scores)

    def compute_dtype(self, x: torch.Tensor) -> torch.dtype:
        """What products are computed in: that of the weights, or autocast's."""
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.w1.dtype

    def _grouped_mm_can_run(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
        # Without rows there is nothing to speed up, and the loop keeps the graph whole; torch's kernel would refuse.
        if not self.use_grouped_mm or x.shape[0] == 0:
            return False
        missing = missing_for(x, *weights)
        if missing is None:
            return True
        if missing not in _said:
            _said.add(missing)
            warnings.warn(f"use_grouped_mm=True, but {missing}: looping over the experts", stacklevel=4)
        return False

    @staticmethod
    def _run_experts_for_loop(
        x: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor
    ) -> torch.Tensor:
        sizes = counts.tolist()
        if min(sizes) < 0 or sum(sizes) != x.shape[0]:
            raise counts_error(counts, x.shape[0])
        # Empty parts go through as well, so that their weights get exact zeros and a rank without any row stays in the
        # graph. unbind, not indexing: its backward is one stack, not one full-size zero tensor an expert.
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, down, up in zip(
                    torch.split(x, sizes), w1.unbind(0), w2.unbind(0), w3.unbind(0), strict=True
                )
            ]
        )

    @staticmethod
    def _run_experts_grouped_mm(
        x: torch.Tensor, ends: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.silu(grouped_linear(x, w1, ends)) * grouped_linear(x, w3, ends)
        return grouped_linear(hidden, w2, ends)


def _generator_of_part(weight: DTensor) -> torch.Generator:
    # DTensor's own random operators give every CPU rank the same numbers, so the experts of all ranks would be equal.
    coordinate = weight.device_mesh.get_coordinate() or [0] * weight.device_mesh.ndim
    part = 0
    for placement, size, position in zip(weight.placements, weight.device_mesh.shape, coordinate, strict=True):
        part = part if placement.is_replicate() else part * size + position
    seed = int(torch.randint(2**40, ())) + part
    return torch.Generator(weight.device).manual_seed(seed)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
