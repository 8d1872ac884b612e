"""The command `hyper-mpmd`: run, plan, check, show and explain-hang for task graphs.

Only typer is imported here; torch, numpy, pydantic and the native module are imported by the command that needs them,
so that --help answers at once. Results go to stdout, talk to stderr. Exit status: 0 fine, 1 refused or a wrong result,
2 usage.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hyper_mpmd import __version__
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


class Policy(str, Enum):
    """`hyper-mpmd policies` says what they do."""

    O0 = "O0"
    O1 = "O1"
    serial = "serial"


class DType(str, Enum):
    """The dtypes of built-in graphs."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class DispatchMode(str, Enum):
    """Who moves the rows on their way to the experts."""

    push = "push"
    pull = "pull"


_BUILT_IN = "Built-in graphs"
_PLANNING = "Planning"
_RUNNING = "Running"


def _size(default: int, text: str) -> Any:
    text += f" \\[default: {default}]"
    return typer.Option(metavar="N", min=1, help=text, show_default=False, rich_help_panel=_BUILT_IN)


_GRAPH = typer.Argument(
    metavar="GRAPH", help="moe-ffn, or FILE.py:FUNCTION (the function returns a TaskGraph, or a TaskGraph and loads)."
)
Graph = Annotated[str, _GRAPH]
_FILES = f"{_GRAPH.help} Or a plan file that `plan --save` wrote; of a world the files of all ranks, in order."
Graphs = Annotated[list[str], typer.Argument(metavar="GRAPH", help=_FILES)]
Tokens = Annotated[int | None, _size(1024, "Tokens of each rank.")]
Hidden = Annotated[int | None, _size(1024, "Hidden size.")]
Intermediate = Annotated[int | None, _size(512, "Intermediate size of each expert.")]
Experts = Annotated[int | None, _size(8, "Experts, over all ranks.")]
TopK = Annotated[int | None, _size(2, "Experts that each token picks.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ep",
        metavar="N",
        min=1,
        help="Ranks that share the experts out. \\[default: 1]",
        show_default=False,
        rich_help_panel=_BUILT_IN,
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="N",
        min=1,
        help="Ranks that share each expert's intermediate size, of each of --ep. \\[default: 1]",
        show_default=False,
        rich_help_panel=_BUILT_IN,
    ),
]
Dtype = Annotated[
    DType | None,
    typer.Option(
        help="Of activations and weights. \\[default: float32]", show_default=False, rich_help_panel=_BUILT_IN
    ),
]
Mode = Annotated[
    DispatchMode | None,
    typer.Option(
        "--dispatch-mode",
        help="Ranks push rows into their experts' ranks, or those pull them. \\[default: push]",
        show_default=False,
        rich_help_panel=_BUILT_IN,
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN|FILE",
        help="How tokens pick experts: balanced, zipf:S (popularity falls as 1/place^S), single (all the same), or "
        "JSON counts from a file (\\[E] or \\[W]\\[E]; for FILE.py:FUNCTION, the loads of its row spaces). "
        "\\[default: zipf:1.2]",
        show_default=False,
        rich_help_panel=_BUILT_IN,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of routing and inputs.", rich_help_panel=_BUILT_IN)]
DeviceName = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="cpu, ascend-a2, ascend-a3 or FILE.toml.", rich_help_panel=_PLANNING),
]
Rank = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Plan this rank of the world alone.",
        show_default=False,
        rich_help_panel=_PLANNING,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="native|python",
        help="Who plans; by default native where it is installed.",
        show_default=False,
        rich_help_panel=_PLANNING,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Threads of each rank. \\[default: as the machine allows]",
        show_default=False,
        rich_help_panel=_RUNNING,
    ),
]
Repeat = Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs of each policy.", rich_help_panel=_RUNNING)]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, help="Limit for each run.", rich_help_panel=_RUNNING)
]
Processes = Annotated[
    bool, typer.Option("--processes", help="Each rank in a process of its own.", rich_help_panel=_RUNNING)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]


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
        typer.Option(help="O0 or O1. \\[default: both, compared]", show_default=False, rich_help_panel=_PLANNING),
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
    policy: Annotated[Policy, typer.Option(help="See `hyper-mpmd policies`.", rich_help_panel=_PLANNING)] = Policy.O1,
    device: DeviceName = "cpu",
    rank: Rank = None,
    backend: Backend = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan: JSON where the name ends in .json, else binary; a file a rank (.r0, ...).",
            show_default=False,
            rich_help_panel=_PLANNING,
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
    graph: Graphs,
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
    policy: Annotated[Policy, typer.Option(help="See `hyper-mpmd policies`.", rich_help_panel=_PLANNING)] = Policy.O1,
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
    graph: Graphs,
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
    policy: Annotated[Policy, typer.Option(help="See `hyper-mpmd policies`.", rich_help_panel=_PLANNING)] = Policy.O1,
    device: DeviceName = "ascend-a3",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER[x]",
            help="What if: link=2x, aiv=24, event_ns=500; may be given several times.",
            show_default=False,
            rich_help_panel=_PLANNING,
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
    graph: Annotated[
        str, typer.Argument(metavar="GRAPH", help=f"{_GRAPH.help} Or a plan file that `plan --save` wrote.")
    ],
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
    policy: Annotated[Policy, typer.Option(help="See `hyper-mpmd policies`.", rich_help_panel=_PLANNING)] = Policy.O1,
    device: DeviceName = "cpu",
    rank: Rank = None,
    backend: Backend = None,
    measured: Annotated[
        bool,
        typer.Option("--measured", help="Run it here and draw what really happened.", rich_help_panel=_RUNNING),
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
