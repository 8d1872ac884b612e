"""The same feed-forward in eager torch, two ways: the peers that moe-ffn is measured against.

Both get their routing sorted in advance, as a kept plan does, so that only the feed-forward itself is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Peer = Callable[[], torch.Tensor]


def peers(given: dict[str, Any], counts: list[int]) -> dict[str, Peer]:
    """given: the inputs of graph moe-ffn on one rank. counts: rows of each expert. Each peer returns y [T, H]."""
    x, w1, w2 = given["x"], given["w1"], given["w2"]
    token = given["gather"].long()
    scale = torch.empty(len(token))
    scale[given["back"].flatten().long()] = given["weights"].flatten()
    ends = torch.tensor(counts).cumsum(0)
    offsets = ends.int()
    rows = [(expert, int(end) - count, int(end)) for expert, (count, end) in enumerate(zip(counts, ends, strict=True))]

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    @torch.no_grad()
    def loop() -> torch.Tensor:
        """An expert at a time."""
        y = torch.zeros(x.shape, dtype=torch.float32)
        for expert, begin, end in rows:
            if begin < end:
                chosen = token[begin:end]
                out = swiglu(x[chosen] @ w1[expert]) @ w2[expert]
                y.index_add_(0, chosen, out * scale[begin:end, None])
        return y.to(x.dtype)

    @torch.no_grad()
    def grouped() -> torch.Tensor:
        """All experts in one grouped product."""
        out = torch._grouped_mm(swiglu(torch._grouped_mm(x[token], w1, offs=offsets)), w2, offs=offsets)
        y = torch.zeros(x.shape, dtype=torch.float32)
        return y.index_add_(0, token, out * scale[:, None]).to(x.dtype)

    return {"torch loop": loop, "torch grouped": grouped}
