"""A timeline drawn in the terminal: a row a core, a colour an op, time from left to right.

Each character cell stands for two moments (its left and right half). Where there is no colour (NO_COLOR, a pipe)
letters stand for ops instead, one moment a cell. More cores than rows are drawn in groups of neighbours of one kind;
the strength of the colour (upper or lower case) says how many of them are at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from hyper_mpmd.scheduler.timeline import Timeline
from hyper_mpmd.viz.units import digits, duration, percent, time_unit

# Told apart by people with any kind of colour vision (after Okabe and Ito); a family of hues a core kind.
_PALETTE = {
    "cube": ("#E69F00", "#E0531F", "#F0E442", "#B5651D"),
    "vector": ("#56B4E9", "#00A878", "#3B6FE0", "#8FD694"),
    "comm": ("#CC79A7", "#9B6FD0", "#F2A7C8", "#6A4C93"),
}
_WAIT = "#5A5A5A"
_FAINTEST = 0.35  # share of an op's colour that is left in a moment in which it hardly ran
_MOST_ROWS = 32
_IDLE, _WAITING = -1, -2


@dataclass(frozen=True)
class _Row:
    pool: str  # cores of one kind on one rank
    label: str
    cores: list[int]


@dataclass(frozen=True)
class _Moments:
    """For each row and moment: which op (or _IDLE, _WAITING), and its share of the row's core time."""

    op: NDArray[np.int64]
    share: NDArray[np.float64]


def draw(
    timeline: Timeline, kinds: Sequence[str], console: Console, *, title: str = "", most_rows: int = _MOST_ROWS
) -> None:
    """Print the timeline on the console, as wide as it is.

    kinds: core kind (cube, vector, comm) of each of the timeline's ops. most_rows: cores are grouped beyond that.
    """
    colour = console.color_system is not None and not console.no_color
    rows = _group(timeline.cores, max(1, most_rows))
    busy, waited = _shares(timeline, rows)
    measured = timeline.kind == "measured"
    label = max((len(row.label) for row in rows), default=0)
    shares = [
        percent(b).rjust(6) + (percent(w).rjust(6) if measured else "") for b, w in zip(busy, waited, strict=True)
    ]
    width = max(16, console.width - label - 2 - len(shares[0] if shares else "") - 1)
    styles = _styles(kinds)
    letters = _letters(timeline.ops)

    def put(text: Text | str) -> None:
        console.print(text, no_wrap=True, crop=True, highlight=False, markup=False, soft_wrap=False)

    total = float(busy @ [len(row.cores) for row in rows]) / max(1, len(timeline.cores))
    put(
        Text.assemble(
            (title, "bold"),
            _plain(
                f"{' · ' if title else ''}{timeline.kind} {duration(timeline.makespan_ns)} on "
                f"{len(timeline.cores)} cores, {percent(total)} busy",
                console,
            ),
        )
    )
    put(Text(" " * (label + 2 + width) + "  busy" + ("  wait" if measured else ""), "dim"))
    moments = _moments(timeline, rows, width * (2 if colour else 1))
    pools = {row.pool for row in rows}
    for index, row in enumerate(rows):
        op, share = moments.op[index], moments.share[index]
        if index and row.pool != rows[index - 1].pool and len(rows) > len(pools):
            put("")
        strip = _coloured(op, share, styles) if colour else Text("|" + _lettered(op, share, letters) + "|")
        gap = " " if colour else ""
        put(Text.assemble(row.label.ljust(label) + gap, strip, (gap + shares[index], "dim")))
    for line in _axis(timeline.makespan_ns, width):
        put(Text(" " * (label + 1) + _plain(line, console), "dim"))
    for entries in _legend(timeline, styles, letters, colour, console.width):
        put(entries)


def _group(cores: Sequence[str], most_rows: int) -> list[_Row]:
    """Neighbours of one kind (and rank) together, as few a row as it takes to stay within most_rows."""
    pools: dict[str, list[int]] = {}
    for index, name in enumerate(cores):
        pools.setdefault(name.rpartition(" ")[0], []).append(index)
    together = 1
    while sum(-(-len(pool) // together) for pool in pools.values()) > most_rows and together < len(cores):
        together += 1
    rows = []
    for pool, members in pools.items():
        for begin in range(0, len(members), together):
            some = members[begin : begin + together]
            first, last = (cores[some[i]].rpartition(" ")[2] for i in (0, -1))
            rows.append(_Row(pool, f"{pool} {first}" + (f"-{last}" if len(some) > 1 else ""), some))
    return rows


def _shares(timeline: Timeline, rows: Sequence[_Row]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of the makespan that the cores of each row were busy, and stood waiting."""
    waited = np.zeros(len(timeline.cores))
    np.add.at(waited, timeline.spans["core"], np.minimum(timeline.spans["wait_ns"], timeline.spans["start_ns"]))
    whole = max(1, timeline.makespan_ns)
    mean = [[float(times[row.cores].mean()) / whole for row in rows] for times in (timeline.busy_ns(), waited)]
    return np.array(mean[0]), np.array(mean[1])


def _moments(timeline: Timeline, rows: Sequence[_Row], count: int) -> _Moments:
    """Cut the makespan into `count` moments; each shows what took most of it, work before waiting."""
    row_of = np.empty(len(timeline.cores), np.int64)
    cores = np.ones(len(rows))
    for index, row in enumerate(rows):
        row_of[row.cores] = index
        cores[index] = len(row.cores)
    spans = timeline.spans
    step = max(1, timeline.makespan_ns) / count
    row = row_of[spans["core"]]
    time = np.zeros((len(rows), len(timeline.ops) + 1, count))  # the last "op" is waiting
    _add(time, row, spans["op"].astype(np.int64), spans["start_ns"] / step, spans["end_ns"] / step)
    waited = spans["wait_ns"] > 0
    begin = np.maximum(0, spans["start_ns"] - spans["wait_ns"])
    waits = np.full(int(waited.sum()), len(timeline.ops))
    _add(time, row[waited], waits, begin[waited] / step, spans["start_ns"][waited] / step)
    time /= cores[:, None, None]
    work, wait = time[:, :-1].sum(axis=1), time[:, -1]
    op = time[:, :-1].argmax(axis=1)
    op = np.where(work > 0.05, op, np.where(wait > 0.05, _WAITING, _IDLE))
    return _Moments(op, np.where(op == _WAITING, wait, work).clip(0, 1))


def _add(
    time: NDArray[np.float64],
    row: NDArray[np.int64],
    op: NDArray[np.int64],
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
) -> None:
    """Add intervals [begin, end), in moments, to time[row, op, moment].

    The share of the moment in which an interval begins or ends is added there; whole moments between them by a running
    sum of starts and stops.
    """
    count = time.shape[2]
    first = np.minimum(begin.astype(np.int64), count - 1)
    last = np.minimum(end.astype(np.int64), count - 1)
    np.add.at(time, (row, op, first), np.minimum(end, first + 1) - begin)
    longer = last > first
    row, op, first, last, end = row[longer], op[longer], first[longer], last[longer], end[longer]
    np.add.at(time, (row, op, last), end - last)
    steps = np.zeros((*time.shape[:2], count + 1))
    np.add.at(steps, (row, op, first + 1), 1.0)
    np.add.at(steps, (row, op, last), -1.0)
    time += np.cumsum(steps[..., :-1], axis=2)


def _styles(kinds: Sequence[str]) -> list[str]:
    """A colour an op, the next of its kind's family."""
    used = dict.fromkeys(_PALETTE, 0)
    styles = []
    for kind in kinds:
        family = _PALETTE[kind]
        styles.append(family[used[kind] % len(family)])
        used[kind] += 1
    return styles


def _letters(ops: Sequence[str]) -> list[str]:
    """A letter an op, no two alike: one of its own name where possible."""
    taken: set[str] = set()
    letters = []
    for name in ops:
        wanted = [c for c in f"{name}abcdefghijklmnopqrstuvwxyz".upper() if c.isascii() and c.isalpha()]
        letter = next((c for c in wanted if c not in taken), "#")
        taken.add(letter)
        letters.append(letter)
    return letters


def _coloured(op: NDArray[np.int64], share: NDArray[np.float64], styles: Sequence[str]) -> Text:
    """Two moments a cell: the left half block in one colour on the other."""
    colours = [_colour(int(o), float(s), styles) for o, s in zip(op, share, strict=True)]
    strip = Text()
    for left, right in zip(colours[::2], colours[1::2], strict=True):
        if left == right:
            strip.append("█" if left else " ", left or "")
        elif left:
            strip.append("▌", f"{left} on {right}" if right else left)
        else:
            strip.append("▐", right or "")
    return strip


def _colour(op: int, share: float, styles: Sequence[str]) -> str | None:
    if op == _IDLE:
        return None
    full = _WAIT if op == _WAITING else styles[op]
    strength = _FAINTEST + (1 - _FAINTEST) * round(share * 4) / 4
    channels = (int(full[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(channel * strength):02X}" for channel in channels)


def _lettered(op: NDArray[np.int64], share: NDArray[np.float64], letters: Sequence[str]) -> str:
    cells = []
    for o, s in zip(op.tolist(), share.tolist(), strict=True):
        letter = " " if o == _IDLE else "." if o == _WAITING else letters[o]
        cells.append(letter if s >= 0.5 else letter.lower())
    return "".join(cells)


def _axis(makespan_ns: int, width: int) -> list[str]:
    """Ticks at round times, and their figures with the unit."""
    unit, name = time_unit(makespan_ns)
    span = max(1, makespan_ns) / unit
    least = span * 10 / width  # room for a figure
    scale = 10.0 ** np.floor(np.log10(least))
    step = float(next(scale * n for n in (1, 2, 5, 10) if scale * n >= least))
    ticks, figures = ["─"] * width, [" "] * (width + 12)
    for number in range(int(span / step + 1e-9) + 1):
        column = min(width - 1, round(number * step / span * width))
        ticks[column] = "┬"
        figure = digits(number * step) if step < 1 else f"{number * step:.0f}"
        figure += f" {name}" if number == 0 else ""
        figures[column : column + len(figure)] = figure
    return ["".join(ticks), "".join(figures).rstrip()]


def _legend(timeline: Timeline, styles: Sequence[str], letters: Sequence[str], colour: bool, width: int) -> list[Text]:
    """Each op that has tasks with its share of all busy time, in as many lines as it takes."""
    spans = timeline.spans
    times = (spans["end_ns"] - spans["start_ns"]).astype(np.float64)
    busy = np.bincount(spans["op"], times, minlength=len(timeline.ops))
    entries = [
        Text.assemble(("■" if colour else letters[op], styles[op] if colour else ""), f" {timeline.ops[op]} {share}")
        for op in np.unique(spans["op"]).tolist()
        for share in [percent(busy[op] / max(1.0, busy.sum()))]
    ]
    if timeline.kind == "measured":
        entries.append(Text.assemble(("■" if colour else ".", _WAIT if colour else ""), " waiting"))
    lines = [Text()]
    for entry in entries:
        if lines[-1] and lines[-1].cell_len + 3 + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1] else "").append(entry)
    return lines


def _plain(text: str, console: Console) -> str:
    """Without signs that the console's encoding lacks."""
    if console.encoding.lower().startswith("utf"):
        return text
    return text.translate(str.maketrans("µ─┬·", "u-+-"))
