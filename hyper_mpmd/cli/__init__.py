"""The command `hyper-mpmd`: run, plan, check, simulate and draw task graphs, and explain what hung.

Only typer is imported here; torch, numpy, pydantic and the native module are imported by the command that needs them,
so that --help answers at once. Results go to stdout, talk to stderr. Exit status: 0 fine, 1 refused or a wrong result,
2 usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hyper_mpmd import __version__
from hyper_mpmd.cli.options import (
    PLANNING,
    RUNNING,
    Backend,
    DeviceName,
    DispatchMode,
    DType,
    Dtype,
    Experts,
    Graph,
    GraphOrPlan,
    GraphOrPlans,
    Hidden,
    Intermediate,
    Json,
    Mode,
    Policy,
    PolicyName,
    Processes,
    Rank,
    Ranks,
    Repeat,
    Routing,
    Seed,
    Shards,
    Timeout,
    Tokens,
    TopK,
    Workers,
)
from hyper_mpmd.errors import HyperMpmdError


class _Group(TyperGroup):
    """Refusals become one clear line and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (HyperMpmdError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"hyper-mpmd: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from None
        except ImportError as error:
            if "_native" not in f"{error.name} {error}":
                raise
            reason = " ".join(str(error).split())
            typer.echo(f"hyper-mpmd: the native module cannot be imported ({reason}): run `make setup`", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Write Mixture-of-Experts work as a graph of typed tasks, schedule it, run it as one fused run, and see it.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hyper-mpmd {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    graph: Graph,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ranks = None,
    tp: Shards = None,
    routing: Routing = None,
    dtype: Dtype = None,
    dispatch_mode: Mode = None,
    seed: Seed = 0,
    policy: Annotated[
        Policy | None,
        typer.Option(help="O0 or O1. \\[default: both, compared]", show_default=False, rich_help_panel=PLANNING),
    ] = None,
    device: DeviceName = "cpu",
    workers: Workers = None,
    repeat: Repeat = 5,
    timeout: Timeout = 120.0,
    processes: Processes = False,
    json: Json = False,
) -> None:
    """Execute a graph on this machine and compare it with plain torch: error, time, tasks per second."""
    from hyper_mpmd.cli.run import run_command

    subject = _subject(graph, tokens, hidden, intermediate, experts, top_k, ep, tp, routing, dtype, dispatch_mode, seed)
    policies = ("O0", "O1") if policy is None else (policy.value,)
    fine = run_command(
        subject,
        policies=policies,
        device=device,
        workers=workers,
        repeat=repeat,
        timeout=timeout,
        processes=processes,
        as_json=json,
    )
    if not fine:
        raise typer.Exit(1)


@app.command()
def plan(
    graph: Graph,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ranks = None,
    tp: Shards = None,
    routing: Routing = None,
    dtype: Dtype = None,
    dispatch_mode: Mode = None,
    seed: Seed = 0,
    policy: PolicyName = Policy.O1,
    device: DeviceName = "cpu",
    rank: Rank = None,
    backend: Backend = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan: JSON where the name ends in .json, else binary; a file a rank (.r0, ...).",
            show_default=False,
            rich_help_panel=PLANNING,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Schedule a graph for a device and say what is in the plan; nothing is executed."""
    from hyper_mpmd.cli.plan import plan_command

    subject = _subject(graph, tokens, hidden, intermediate, experts, top_k, ep, tp, routing, dtype, dispatch_mode, seed)
    plan_command(
        subject, policy=policy.value, device=device, rank=rank, backend=_backend(backend), save=save, as_json=json
    )


@app.command()
def check(
    context: typer.Context,
    graph: GraphOrPlans,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ranks = None,
    tp: Shards = None,
    routing: Routing = None,
    dtype: Dtype = None,
    dispatch_mode: Mode = None,
    seed: Seed = 0,
    policy: PolicyName = Policy.O1,
    device: DeviceName = "cpu",
    rank: Rank = None,
    backend: Backend = None,
    json: Json = False,
) -> None:
    """Prove that a plan can neither hang nor race, or show the smallest counter-example (exit status 1)."""
    from hyper_mpmd.cli.check import check_command

    sizes = (tokens, hidden, intermediate, experts, top_k, ep, tp, routing, dtype, dispatch_mode)
    saved = _is_saved(context, graph[0], sizes)
    if not saved and len(graph) > 1:
        raise typer.BadParameter(f"one graph, or plan files; got {', '.join(graph)}")
    fine = check_command(
        [Path(file) for file in graph] if saved else _subject(graph[0], *sizes, seed),
        policy=policy.value,
        device=device,
        rank=rank,
        backend=_backend(backend),
        as_json=json,
    )
    if not fine:
        raise typer.Exit(1)


@app.command()
def sim(
    context: typer.Context,
    graph: GraphOrPlans,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ranks = None,
    tp: Shards = None,
    routing: Routing = None,
    dtype: Dtype = None,
    dispatch_mode: Mode = None,
    seed: Seed = 0,
    policy: PolicyName = Policy.O1,
    device: DeviceName = "ascend-a3",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER[x]",
            help="What if: link=2x, aiv=24, event_ns=500; may be given several times.",
            show_default=False,
            rich_help_panel=PLANNING,
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(metavar="SHARE", help="Tasks have their cores up to this share longer, 0 to 1.")
    ] = 0.0,
    backend: Backend = None,
    json: Json = False,
) -> None:
    """Execute a graph in virtual time on a device that need not be at hand: makespan, bound, who waits for what."""
    from hyper_mpmd.cli.sim import sim_command

    sizes = (tokens, hidden, intermediate, experts, top_k, ep, tp, routing, dtype, dispatch_mode)
    saved = _is_saved(context, graph[0], sizes, "changes")
    if not saved and len(graph) > 1:
        raise typer.BadParameter(f"one graph, or plan files; got {', '.join(graph)}")
    sim_command(
        [Path(file) for file in graph] if saved else _subject(graph[0], *sizes, seed),
        policy=policy.value,
        device=device,
        changes=changes or [],
        jitter=jitter,
        seed=seed,
        backend=_backend(backend),
        as_json=json,
    )


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE.toml]", help="Every figure of this one.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the devices, or the figures of one with their units and sources."""
    from hyper_mpmd.cli.devices import devices_command

    devices_command(name, as_json=json)


@app.command()
def policies(json: Json = False) -> None:
    """List the policies and what they do."""
    from hyper_mpmd.cli.devices import policies_command

    policies_command(as_json=json)


@app.command()
def show(
    context: typer.Context,
    graph: GraphOrPlan,
    tokens: Tokens = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    ep: Ranks = None,
    tp: Shards = None,
    routing: Routing = None,
    dtype: Dtype = None,
    dispatch_mode: Mode = None,
    seed: Seed = 0,
    policy: PolicyName = Policy.O1,
    device: DeviceName = "cpu",
    rank: Rank = None,
    backend: Backend = None,
    measured: Annotated[
        bool,
        typer.Option("--measured", help="Run it here and draw what really happened.", rich_help_panel=RUNNING),
    ] = False,
    workers: Workers = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows to draw at most; more cores are grouped.")] = 32,
    json: Json = False,
) -> None:
    """Draw the timeline, predicted or measured: a row a core, a colour an op."""
    from hyper_mpmd.cli.show import show_command

    sizes = (tokens, hidden, intermediate, experts, top_k, ep, tp, routing, dtype, dispatch_mode)
    show_command(
        Path(graph) if _is_saved(context, graph, sizes, "backend") else _subject(graph, *sizes, seed),
        policy=policy.value,
        device=device,
        rank=rank,
        backend=_backend(backend),
        measured=measured,
        workers=workers,
        seed=seed,
        most_rows=rows,
        as_json=json,
    )


@app.command("explain-hang")
def explain_hang(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file that LaunchTimeout names.", exists=True, dir_okay=False)
    ],
    json: Json = False,
) -> None:
    """Explain a launch that passed its deadline: the chain of waits and its root cause, from the file it left."""
    from hyper_mpmd.cli.explain_hang import explain_hang_command

    explain_hang_command(file, as_json=json)


def _is_saved(context: typer.Context, graph: str, sizes: tuple[Any, ...], *more: str) -> bool:
    """Whether a plan file is given instead of a graph; then options of planning (and `more`) are refused."""
    file = Path(graph)
    if not file.is_file() or file.suffix == ".py":
        return False
    if any(value is not None for value in sizes):
        raise typer.BadParameter("a plan file is what it is: options of built-in graphs do not apply to it")
    for name in ("policy", "device", "rank", *more):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "set" if name == "changes" else name
            raise typer.BadParameter(f"a plan file is what it is: --{option} does not apply to it; plan anew with it")
    return True


def _subject(
    graph: str,
    tokens: int | None,
    hidden: int | None,
    intermediate: int | None,
    experts: int | None,
    top_k: int | None,
    ep: int | None,
    tp: int | None,
    routing: str | None,
    dtype: DType | None,
    dispatch_mode: DispatchMode | None,
    seed: int,
) -> Any:
    from hyper_mpmd.cli.subject import UsageError, make_subject

    sizes = {"tokens": tokens, "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    try:
        return make_subject(
            graph,
            sizes=sizes,
            ep=ep,
            tp=tp,
            routing=routing,
            dtype=None if dtype is None else dtype.value,
            dispatch_mode=None if dispatch_mode is None else dispatch_mode.value,
            seed=seed,
        )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


def _backend(name: str | None) -> Any:
    if name not in (None, "native", "python"):
        raise typer.BadParameter(f"--backend is {name!r}; it must be native or python")
    return name


def main() -> None:
    """The entry point."""
    # Letters that the terminal's encoding lacks become question marks, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="hyper-mpmd")
