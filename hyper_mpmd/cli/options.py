"""The arguments and options that commands share, each with its help; imports nothing but typer."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer


class Policy(str, Enum):
    """`hyper-mpmd policies` says what they do."""

    O0 = "O0"
    O1 = "O1"
    serial = "serial"
    published = "published"


class DType(str, Enum):
    """The dtypes of built-in graphs."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DispatchMode(str, Enum):
    """Who moves the rows on their way to the experts."""

    push = "push"
    pull = "pull"


BUILT_IN = "Built-in graphs"
PLANNING = "Planning"
RUNNING = "Running"


def _size(default: int, text: str) -> Any:
    text += f" \\[default: {default}]"
    return typer.Option(metavar="N", min=1, help=text, show_default=False, rich_help_panel=BUILT_IN)


_GRAPH = "moe-ffn, moe-ffn-backward, or FILE.py:FUNCTION (the function returns a TaskGraph, or a TaskGraph and loads)."
_SAVED = "Or a plan file that `plan --save` wrote"
Graph = Annotated[str, typer.Argument(metavar="GRAPH", help=_GRAPH)]
GraphOrPlan = Annotated[str, typer.Argument(metavar="GRAPH", help=f"{_GRAPH} {_SAVED}.")]
GraphOrPlans = Annotated[
    list[str], typer.Argument(metavar="GRAPH", help=f"{_GRAPH} {_SAVED}; of a world the files of all ranks, in order.")
]
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
        rich_help_panel=BUILT_IN,
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
        rich_help_panel=BUILT_IN,
    ),
]
Dtype = Annotated[
    DType | None,
    typer.Option(help="Of activations and weights. \\[default: float32]", show_default=False, rich_help_panel=BUILT_IN),
]
Mode = Annotated[
    DispatchMode | None,
    typer.Option(
        "--dispatch-mode",
        help="Ranks push rows into their experts' ranks, or those pull them. \\[default: push]",
        show_default=False,
        rich_help_panel=BUILT_IN,
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
        rich_help_panel=BUILT_IN,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of routing and inputs.", rich_help_panel=BUILT_IN)]
PolicyName = Annotated[Policy, typer.Option(help="See `hyper-mpmd policies`.", rich_help_panel=PLANNING)]
DeviceName = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="cpu, ascend-a2, ascend-a3 or FILE.toml.", rich_help_panel=PLANNING),
]
Rank = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Plan this rank of the world alone.",
        show_default=False,
        rich_help_panel=PLANNING,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="native|python",
        help="Who plans; by default native where it is installed.",
        show_default=False,
        rich_help_panel=PLANNING,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Threads of each rank. \\[default: as the machine allows]",
        show_default=False,
        rich_help_panel=RUNNING,
    ),
]
Repeat = Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs of each policy.", rich_help_panel=RUNNING)]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, help="Limit for each run.", rich_help_panel=RUNNING)
]
Processes = Annotated[
    bool, typer.Option("--processes", help="Each rank in a process of its own.", rich_help_panel=RUNNING)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
