"""Are the numbers right? Outputs of runs held against one another and against the reference engine."""

from __future__ import annotations

import hashlib

import torch

Outputs = list[dict[str, torch.Tensor]]
# What rounding may cost, relative to the largest output: float32 sums in another order; 16 bits rounded after each op.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tolerance(reference: Outputs) -> float:
    """The relative error that rounding explains; 0 where all outputs are integers."""
    return max((_TOLERANCES.get(t.dtype, 0.0) for own in reference for t in own.values()), default=0.0)


def max_rel_error(outputs: Outputs, reference: Outputs) -> float:
    """The largest absolute difference over the largest absolute reference, of the worst output of the worst rank.

    Infinite where one holds a NaN or an infinity and the other does not.
    """
    worst = 0.0
    for own, wanted in zip(outputs, reference, strict=True):
        for name, tensor in wanted.items():
            if tensor.numel() == 0:
                continue
            a, b = own[name].double(), tensor.double()
            if not bool((torch.isfinite(a) & torch.isfinite(b)).all()):
                worst = worst if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
                continue
            difference, largest = float((a - b).abs().max()), float(b.abs().max())
            worst = max(worst, difference / largest if largest else float("inf") if difference else 0.0)
    return worst


def digest(outputs: Outputs) -> str:
    """SHA-256 over the bytes of all outputs, in order of rank, then of name."""
    total = hashlib.sha256()
    for own in outputs:
        for name in sorted(own):
            total.update(own[name].contiguous().view(torch.uint8).numpy().tobytes() if own[name].numel() else b"")
    return total.hexdigest()
