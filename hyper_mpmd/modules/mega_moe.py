"""MegaMoeExperts: the experts that a router picked, run forward and backward as one fused plan, over ranks or on one.

Shapes: T tokens of this rank, H hidden, I intermediate, E experts over all ranks, K choices of a token, EP ranks that
share the experts out, TP ranks that each expert is cut over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyper_mpmd.modules.mega_autograd import ExpertsFunction, Step
from hyper_mpmd.modules.mega_config import Config
from hyper_mpmd.modules.mega_errors import MegaMoeError, MegaMoeStateError, MegaMoeTypeError, MegaMoeValueError
from hyper_mpmd.modules.mega_exchange import Record
from hyper_mpmd.modules.mega_execution import Execution, MeasuredRun
from hyper_mpmd.modules.mega_groups import Grid
from hyper_mpmd.modules.mega_parallel import as_global, as_local
from hyper_mpmd.modules.mega_route import DTYPES, Call, check_call
from hyper_mpmd.modules.moe_ffn_backward import GRADIENTS
from hyper_mpmd.tasks import DispatchMode


class MegaMoeExperts(nn.Module):
    """output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden_states[t]), E / EP experts a rank.

    expert e: (silu(x @ gate) * (x @ up)) @ down, [gate, up] = gate_up_weight[e] [H, 2I], down = down_weight[e] [I, H].

    local_num_tokens: T of every call on every rank; or max_local_num_tokens: the largest T, which may change from call
    to call, differ between ranks and be 0. Exactly one of them.
    ep_size, ep_group: ranks that share the experts out; the group is all ranks unless given. ep_size=1 needs no
    torch.distributed.
    tp_group: TP ranks that each expert is cut over, along I. They call with the same tokens and get the same output;
    rank j of them has shards as parameters: of either half of gate_up columns [j * I / TP, (j + 1) * I / TP), which
    makes [E/EP, H, 2I/TP], and those rows of down, [E/EP, I/TP, H]. With ep_size > 1 both groups must be given and form
    a grid, as those of a device mesh do.
    expert_capacity_factor: None leaves room for every row; f >= 1 for ceil(T * K * f) on each rank, rounded up to 128,
    and more rows than that raise "capacity overflow" on all ranks, before anything runs.
    dispatch_mode: "push": rows on their way to the experts, in forward and backward, are written by their own rank;
    "pull": the experts' ranks read them. Results are the same, bit for bit. On the way back rows are always pushed.
    swiglu_limit: x @ gate is clamped to at most it and x @ up to within it on both sides, as in the experts of gpt-oss;
    no gradient flows to what was clamped. None: nothing is.
    create_parameters=False: the layer has none, and each call brings expert_weights.
    device, dtype: of the parameters, float32, bfloat16 or float16.

    Errors: MegaMoeValueError (a ValueError) for sizes; the same on all ranks where their values differ, at the first
    call. Layers hold shared memory from their first call to `close`.
    """

    gate_up_weight: torch.Tensor | None
    down_weight: torch.Tensor | None

    def __init__(
        self,
        *,
        local_num_tokens: int | None = None,
        max_local_num_tokens: int | None = None,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        ep_size: int = 1,
        ep_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        expert_capacity_factor: float | None = None,
        dispatch_mode: DispatchMode = "push",
        swiglu_limit: float | None = None,
        create_parameters: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = Config(
            local_num_tokens,
            max_local_num_tokens,
            hidden_size,
            intermediate_size,
            num_experts,
            top_k,
            ep_size,
            1,
            expert_capacity_factor,
            dispatch_mode,
            swiglu_limit,
        )
        grid = Grid(ep_size, ep_group, tp_group)
        config = replace(config, tp_size=grid.tp_size)
        super().__init__()
        self.config = config
        self._grid = grid
        self._execution = Execution(config, grid)
        self._number = 0  # among layers that share resources
        self._shared = False
        self._closed = False
        for name, shape in (
            ("gate_up_weight", (config.local_experts, hidden_size, 2 * config.local_intermediate)),
            ("down_weight", (config.local_experts, config.local_intermediate, hidden_size)),
        ):
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if create_parameters else None
            self.register_parameter(name, weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights, uniform within 1 / sqrt(fan in), expert by expert."""
        with torch.no_grad():
            fans = (self.config.hidden_size, self.config.intermediate_size)
            for weight, fan in zip((self.gate_up_weight, self.down_weight), fans, strict=True):
                for expert in weight if weight is not None else ():
                    expert.uniform_(-(fan**-0.5), fan**-0.5)

    # To torch.compile the whole call is one operation: a model around it is compiled up to here and from here on.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_expert: torch.Tensor | None = None,
        *,
        expert_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """hidden_states [..., H], T tokens in all; topk_ids [T, K] int32 or int64, global expert numbers; topk_weights
        [T, K], floating. Returns the shape and dtype of hidden_states; differentiable in it, in topk_weights and in the
        parameters.

        tokens_per_expert: [E] int32 or int64, how often each expert stands in topk_ids; counted where it is not given.
        expert_weights: (gate_up, down) in place of the layer's parameters.

        Errors (over ranks the same on all, naming the rank): MegaMoeValueError, MegaMoeTypeError,
        CapacityOverflowError; MegaMoeStateError for a closed layer or one in use by another thread.
        """
        if self._closed:
            raise MegaMoeStateError("this MegaMoeExperts is closed; construct a new one")
        execution = self._execution
        with execution.claim():
            call: Call | None = None
            refusal: MegaMoeError | None = None
            try:
                weights = self._weights(expert_weights)
                call = check_call(self.config, hidden_states, topk_ids, topk_weights, tokens_per_expert, weights)
            except MegaMoeError as error:
                refusal = error
            met = execution.meet(self._record(call, refusal))
            assert call is not None
            output = ExpertsFunction.apply(  # type: ignore[no-untyped-call]
                Step.of(execution, met, call), call.hidden, call.weights, call.w1, call.w2
            )
        made: torch.Tensor = output.view(hidden_states.shape)
        return made

    @classmethod
    def share_execution_resources(cls, modules: Iterable[MegaMoeExperts]) -> None:
        """Let layers of one configuration run with one workspace, one after another; before the first call of each.

        Parameters, gradients and outstanding activations stay separate. Errors: MegaMoeValueError for no layers, one
        twice, or different configurations; MegaMoeTypeError for other classes; MegaMoeStateError for a layer that is
        closed, used, or shares with others already.
        """
        layers = list(modules)
        if not layers:
            raise MegaMoeValueError("share_execution_resources was given no modules")
        for number, layer in enumerate(layers):
            if type(layer) is not cls:
                raise MegaMoeTypeError(f"module {number} is a {type(layer).__name__}; all must be {cls.__name__}")
        if len({id(layer) for layer in layers}) < len(layers):
            raise MegaMoeValueError("share_execution_resources was given one module twice")
        first = layers[0]
        for number, layer in enumerate(layers):
            if layer._closed:
                raise MegaMoeStateError(f"module {number} is closed")
            if layer._execution.used or layer._shared:
                what = "shares resources already" if layer._shared else "was called already"
                raise MegaMoeStateError(f"module {number} {what}; share before the first forward")
            if difference := first.config.difference(layer.config):
                name, mine, theirs = difference
                raise MegaMoeValueError(f"module {number} has {name}={theirs!r}, module 0 has {mine!r}")
            if not layer._grid.has_groups_of(first._grid):
                raise MegaMoeValueError(f"module {number} and module 0 have different ep_groups or tp_groups")
        execution = Execution(first.config, first._grid, members=len(layers))
        for number, layer in enumerate(layers):
            layer._execution, layer._number, layer._shared = execution, number, True

    @contextmanager
    def measure(self) -> Iterator[list[MeasuredRun]]:
        """Within it, each forward and backward of this layer, and of those it shares resources with, is added to the
        list, in order, with this rank's measured timeline. Any rank may measure; results are the same.

            with experts.measure() as runs:
                loss_of(model(x)).backward()
            forward, backward = runs[0], runs[-1]
        """
        before, runs = self._execution.measured, list[MeasuredRun]()
        self._execution.measured = runs
        try:
            yield runs
        finally:
            self._execution.measured = before

    def close(self) -> None:
        """Give the resources back: after the last backward, in the same order on all ranks, before the process group
        is destroyed. Idempotent; the last layer that shares resources frees them. May be called again if it raises."""
        if self._closed:
            return
        with self._execution.claim():
            self._execution.leave()
        self._closed = True

    def __enter__(self) -> MegaMoeExperts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or self.config.ranks == 1:
            self.close()
        # Else the peers may be anywhere: shared memory is given back when the process ends, which waits for nobody.

    # ---- state: entries of a layer over ranks carry the global range of its experts --------------------------------

    def global_view(self, tensor: torch.Tensor) -> Any:
        """A tensor like one of the parameters (an optimizer's moment, say) as state_dict shows those: over ranks a
        DTensor of all experts, so that distributed checkpoints load over another number of ranks. Shares its memory.
        """
        return as_global(tensor, self.config, self._grid)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            if prefix + name in destination:
                destination[prefix + name] = self.global_view(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._parameters:
            if prefix + name in state_dict:
                state_dict[prefix + name] = as_local(state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        config = self.config
        tokens = f"T={config.most_tokens}" if config.local_num_tokens is not None else f"T<={config.most_tokens}"
        return (
            f"{tokens}, H={config.hidden_size}, I={config.intermediate_size}, E={config.num_experts}, "
            f"K={config.top_k}, EP={config.ep_size}" + (f", TP={config.tp_size}" if config.tp_size > 1 else "")
        )

    # ---- copies have resources of their own ------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoeExperts:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        state = {name: value for name, value in self.__dict__.items() if name not in ("_execution", "_grid")}
        made.__dict__.update(copy.deepcopy(state, memo))
        made._own(self._grid)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self._grid.spans_a_subgroup:
            raise MegaMoeTypeError(
                "a MegaMoeExperts over a subgroup cannot be pickled: process groups do not travel; save its state_dict"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_execution"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._own(self._grid)

    def _own(self, grid: Grid) -> None:
        self._grid = grid
        self._execution = Execution(self.config, grid)
        self._number, self._shared = 0, False

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _weights(self, given: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[Any, Any]:
        if given is None:
            if self.gate_up_weight is None:
                raise MegaMoeValueError("this layer has no parameters (create_parameters=False); pass expert_weights")
            return self.gate_up_weight, self.down_weight
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise MegaMoeTypeError(f"expert_weights is {type(given).__name__}; it must be (gate_up, down)")
        return given[0], given[1]

    def _record(self, call: Call | None, refusal: MegaMoeError | None) -> Record:
        if call is None:
            return Record(0, np.zeros(self.config.num_experts, np.int64), frozenset(), self._number, 0, 0, refusal)
        tensors = (call.hidden, call.weights, call.w1, call.w2)
        grad = torch.is_grad_enabled()
        wanted = frozenset(
            name for name, tensor in zip(GRADIENTS, tensors, strict=True) if grad and tensor.requires_grad
        )
        dtype = list(DTYPES).index(call.hidden.dtype)
        digest = crc32(call.back.numpy().tobytes()) if self.config.tp_size > 1 else 0
        return Record(call.tokens, call.counts, wanted, self._number, dtype, digest)
