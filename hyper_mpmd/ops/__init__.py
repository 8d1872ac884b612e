"""The built-in ops, one file each. A user's own op is a subclass of `Op` in a file of theirs."""

from hyper_mpmd.ops.combine import Combine
from hyper_mpmd.ops.dispatch import Dispatch
from hyper_mpmd.ops.gather_sum import GatherSum
from hyper_mpmd.ops.gather_sum_scalars import GatherSumScalars
from hyper_mpmd.ops.grouped_matmul import GroupedMatmul
from hyper_mpmd.ops.grouped_matmul_grad import GroupedMatmulDW, GroupedMatmulT
from hyper_mpmd.ops.matmul import Matmul
from hyper_mpmd.ops.permute import Permute
from hyper_mpmd.ops.permute_scalars import PermuteScalars
from hyper_mpmd.ops.put import Put
from hyper_mpmd.ops.swiglu import SwiGLU
from hyper_mpmd.ops.swiglu_grad import SwiGLUGrad, WeightedSwiGLU
from hyper_mpmd.ops.unpermute import Unpermute
from hyper_mpmd.tasks.op import Op

__all__ = [
    "Combine",
    "Dispatch",
    "GatherSum",
    "GatherSumScalars",
    "GroupedMatmul",
    "GroupedMatmulDW",
    "GroupedMatmulT",
    "Matmul",
    "Op",
    "Permute",
    "PermuteScalars",
    "Put",
    "SwiGLU",
    "SwiGLUGrad",
    "Unpermute",
    "WeightedSwiGLU",
]
