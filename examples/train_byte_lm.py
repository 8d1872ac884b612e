"""Train a small byte-level language model whose feed-forwards are MegaMoeExperts, on a real text.

    python examples/train_byte_lm.py --steps 50
    torchrun --standalone --nproc-per-node=2 examples/train_byte_lm.py --steps 50 --save ckpt
    python examples/train_byte_lm.py --steps 50 --resume ckpt        # on, at another number of ranks

Experts are shared out over the ranks, everything else is the same on all and averaged by DDP. The layers share one
workspace. The batch is that of all ranks together, so the loss does not depend on how many there are. --plain trains
the same model with the experts in plain torch. With --json the last line of stdout is for scripts;
--timeline draws what the cores did in one layer of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hyper_mpmd import MegaMoeExperts
from hyper_mpmd.expert_parallel import FeedForward
from hyper_mpmd.modules.mega_parallel import expert_parameters
from hyper_mpmd.viz.terminal import draw

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEADS, LAYERS = 128, 128, 8, 2, 4, 2
SEQUENCES, LENGTH = 8, 128  # of one step, over all ranks; bytes of each
MEASURED_STEPS = 8  # the last ones, with --timeline
BALANCE = 0.01  # weight of the load-balancing loss: E * sum over experts of (share of choices * mean score)


class PlainExperts(nn.Module):
    """The same layer in plain torch: weights gathered from all ranks, then one expert after another."""

    def __init__(self, like: MegaMoeExperts) -> None:
        super().__init__()
        self.gate_up_weight, self.down_weight = like.gate_up_weight, like.down_weight

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        whole = [self.gate_up_weight, self.down_weight]
        if dist.is_initialized():
            whole = [torch.cat(all_gather(weight)) for weight in whole]
        y_TH = torch.zeros_like(x_TH)
        for expert in range(EXPERTS):
            token, choice = (ids_TK == expert).nonzero(as_tuple=True)
            gate, up = (x_TH[token] @ whole[0][expert]).chunk(2, dim=-1)
            rows = weights_TK[token, choice, None] * ((F.silu(gate) * up) @ whole[1][expert])
            y_TH = y_TH.index_add(0, token, rows)
        return y_TH


class Block(nn.Module):
    """Attention, then the experts that the router picks for each byte, beside a shared one."""

    def __init__(self, tokens: int, ranks: int, plain: bool) -> None:
        super().__init__()
        self.attention_norm, self.experts_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.shared = FeedForward(HIDDEN, INTERMEDIATE)
        experts = MegaMoeExperts(
            local_num_tokens=tokens, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_experts=EXPERTS,
            top_k=TOP_K, ep_size=ranks,
        )  # fmt: skip
        self.experts = PlainExperts(experts) if plain else experts

    def forward(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's output, its load-balancing loss, and how many choices each expert got on all ranks, [E]."""
        shape = x_BSH.shape
        q, k, v = (
            part.view(*shape[:2], HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x_BSH)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.out(mixed.transpose(1, 2).reshape(shape))
        x_TH = self.experts_norm(x_BSH).reshape(-1, HIDDEN)
        scores_TE = self.router(x_TH).softmax(dim=-1)
        weights_TK, ids_TK = scores_TE.topk(TOP_K)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS)
        if dist.is_initialized():
            dist.all_reduce(counts_E)  # the balance is that of the whole batch
        balance = EXPERTS * (counts_E / counts_E.sum() * scores_TE.mean(dim=0)).sum()
        y_TH = self.experts(x_TH, ids_TK, weights_TK) + self.shared(x_TH)
        return x_BSH + y_TH.view(shape), balance, counts_E


class ByteModel(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, tokens: int, ranks: int, plain: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(tokens, ranks, plain) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, bytes_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_BSH = self.embedding(bytes_BS) + self.position.weight
        losses, counts = [], []
        for block in self.blocks:
            x_BSH, balance, counts_E = block(x_BSH)
            losses.append(balance)
            counts.append(counts_E)
        return self.head(self.norm(x_BSH)), torch.stack(losses).mean(), torch.stack(counts)


def build(rank: int, ranks: int, plain: bool, seed: int) -> ByteModel:
    """The model of this rank: the same numbers whatever the number of ranks, each rank its share of the experts."""
    torch.manual_seed(seed)
    model = ByteModel(SEQUENCES // ranks * LENGTH, ranks, plain)
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                share = len(parameter)
                whole = torch.randn(EXPERTS, *parameter.shape[1:], generator=made) * parameter.shape[1] ** -0.5
                parameter.copy_(whole[rank * share : (rank + 1) * share])
            elif parameter.dim() == 2:
                std = 0.02 if "embedding" in name or "position" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=made) * std)
    if not plain:
        MegaMoeExperts.share_execution_resources(block.experts for block in model.blocks)
    return model


def batch(text: torch.Tensor, step: int, seed: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's sequences of the step, one byte longer than the model reads."""
    made = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - LENGTH, (SEQUENCES,), generator=made)
    own = starts[rank * SEQUENCES // ranks : (rank + 1) * SEQUENCES // ranks]
    return torch.stack([text[start : start + LENGTH + 1] for start in own.tolist()])


def state(model: ByteModel, optimizer: torch.optim.AdamW, step: int) -> dict[str, Any]:
    """What a checkpoint holds; experts and their moments as parts of all experts, so that it loads at any EP size."""
    moments = {}
    for name, parameter in model.named_parameters():
        if parameter not in optimizer.state:
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        owner = model.get_submodule(name.rpartition(".")[0])
        whole = owner.global_view if isinstance(owner, MegaMoeExperts) else lambda tensor: tensor
        for key, value in optimizer.state[parameter].items():
            moments[f"{name}.{key}"] = value if key == "step" else whole(value)
    return {"model": model.state_dict(), "optimizer": moments, "step": torch.tensor(step)}


def draw_quickest(measured: dict[int, list[Any]], ranks: int) -> None:
    """Of the measured steps the one that took least: the first layer's experts, forward and backward, on rank 0."""
    step = min(measured, key=lambda step: sum(run.timeline.makespan_ns for run in measured[step]))
    for run, way in ((measured[step][0], "forward"), (measured[step][-1], "backward")):
        draw(run.timeline, run.kinds, Console(highlight=False), title=f"step {step + 1}, rank 0 of {ranks}, {way}")
        print()


def train(options: argparse.Namespace, rank: int, ranks: int) -> dict[str, float]:
    raw = "\n".join(pydoc_data.topics.topics.values()).encode() if options.text is None else options.text.read_bytes()
    if len(raw) <= LENGTH + 1:
        raise SystemExit(f"{options.text} has {len(raw)} bytes; at least {LENGTH + 2} are needed")
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    model = build(rank, ranks, options.plain, options.seed)
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    wrapped: nn.Module = model
    if ranks > 1:
        ignored = [name for name, _ in model.named_parameters() if ".experts." in name]
        assert options.plain or ignored == list(expert_parameters(model).names)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    first = 0
    if options.resume is not None:
        saved = state(model, optimizer, 0)
        dcp.load(saved, checkpoint_id=options.resume, no_dist=ranks == 1)
        model.load_state_dict(saved["model"])
        first = int(saved["step"])
    console = Console(stderr=True, quiet=rank > 0)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    losses, skews, began = [], [], time.perf_counter()
    measured: dict[int, list[Any]] = {}  # step: the runs of all layers, forward and backward
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(first, first + options.steps):
            bytes_BS = batch(text, step, options.seed, rank, ranks)
            late = step >= first + options.steps - MEASURED_STEPS
            measuring = model.blocks[0].experts.measure() if options.timeline and late else nullcontext([])
            with measuring as runs:
                logits, balance, counts_LE = wrapped(bytes_BS[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), bytes_BS[:, 1:].flatten())
                optimizer.zero_grad()
                (loss + BALANCE * balance).backward()
            if runs:
                measured[step] = runs
            for parameter in experts if ranks > 1 else ():
                assert parameter.grad is not None
                parameter.grad.div_(ranks)  # summed over the ranks' losses; DDP has averaged all others
            optimizer.step()
            mean_loss = loss.detach() / ranks
            if ranks > 1:
                dist.all_reduce(mean_loss)
            losses.append(float(mean_loss))
            skews.append(float((counts_LE.amax(dim=1) / counts_LE.float().mean(dim=1)).max()))
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}, skew {skews[-1]:.2f}")
    seconds = time.perf_counter() - began
    if options.timeline and rank == 0:
        draw_quickest(measured, ranks)
    if options.save is not None:
        dcp.save(state(model, optimizer, first + options.steps), checkpoint_id=options.save, no_dist=ranks == 1)
    for block in model.blocks if not options.plain else ():
        block.experts.close()
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_second": SEQUENCES * LENGTH * len(losses) / seconds,
        "steps": first + options.steps,
        "skew": skews[-1],
        **({"losses": losses} if options.losses else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, help="a file; by default the topics that Python's help() shows")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder of the checkpoint to write at the end")
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to go on from, of any number of ranks")
    parser.add_argument("--plain", action="store_true", help="experts in plain torch, to compare with")
    parser.add_argument("--timeline", action="store_true", help="draw what the cores did in a layer of a step")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is JSON")
    parser.add_argument("--losses", action="store_true", help="with --json: the loss of every step too")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if options.plain and options.timeline:
        parser.error("--timeline draws runs of MegaMoeExperts; leave out --plain")
    if options.plain and (options.save or options.resume):
        parser.error("--save and --resume know the experts of MegaMoeExperts; leave out --plain")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if SEQUENCES % ranks or EXPERTS % ranks:
        parser.error(f"{ranks} ranks cannot share {SEQUENCES} sequences and {EXPERTS} experts evenly")
    if ranks > 1:
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    rank = dist.get_rank() if ranks > 1 else 0
    result = train(options, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(
            f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f} in {options.steps} steps, {ranks} rank(s), "
            f"{result['tokens_per_second']:.0f} tokens/s, busiest expert {result['skew']:.2f} times the mean"
        )
        if options.json:
            print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
