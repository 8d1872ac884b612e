"""Mixture-of-Experts blocks for torch, and expert, tensor and expert-tensor parallelism for them.

Built on torch's own DeviceMesh, DTensor, functional collectives, fully_shard and distributed checkpoints. Guide and
tables: docs/expert-parallel.md.
"""

from hyper_mpmd.expert_parallel.dispatch import AllToAllTokenDispatcher, DispatchContext, Dispatched
from hyper_mpmd.expert_parallel.ep import ExpertParallel
from hyper_mpmd.expert_parallel.ep_tp import ExpertTensorParallel
from hyper_mpmd.expert_parallel.errors import ExpertParallelError, ExpertParallelTypeError
from hyper_mpmd.expert_parallel.feed_forward import FeedForward
from hyper_mpmd.expert_parallel.gradients import clip_grad_norm_, reduce_gradients
from hyper_mpmd.expert_parallel.grouped_experts import GroupedExperts
from hyper_mpmd.expert_parallel.load_balance import update_expert_bias
from hyper_mpmd.expert_parallel.moe import MoE
from hyper_mpmd.expert_parallel.permute import permutation, unpermutation
from hyper_mpmd.expert_parallel.router import TokenChoiceTopKRouter
from hyper_mpmd.expert_parallel.tp import TensorParallel

__all__ = [
    "MoE",
    "GroupedExperts",
    "FeedForward",
    "TokenChoiceTopKRouter",
    "update_expert_bias",
    "permutation",
    "unpermutation",
    "ExpertParallel",
    "TensorParallel",
    "ExpertTensorParallel",
    "AllToAllTokenDispatcher",
    "DispatchContext",
    "Dispatched",
    "reduce_gradients",
    "clip_grad_norm_",
    "ExpertParallelError",
    "ExpertParallelTypeError",
]
