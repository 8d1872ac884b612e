"""The timeline in the terminal: a row a core, moments show what took most of them, letters where there is no colour."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from hyper_mpmd.scheduler.timeline import SPAN, Timeline
from hyper_mpmd.viz.terminal import draw


def timeline(spans, cores=("core 0", "core 1"), ops=("up", "act"), kind="predicted"):
    """spans: (core, op, start, end, wait)."""
    records = np.zeros(len(spans), SPAN)
    for record, (core, op, start, end, wait) in zip(records, spans, strict=True):
        record["core"], record["op"] = core, op
        record["start_ns"], record["end_ns"], record["wait_ns"] = start, end, wait
    return Timeline(kind, tuple(cores), tuple(ops), records)


def drawn(made, width=60, kinds=("cube", "vector"), colour=False, **options):
    out = io.StringIO()
    terminal = {"force_terminal": True, "color_system": "truecolor"} if colour else {"no_color": True}
    draw(made, kinds, Console(file=out, width=width, **terminal), **options)
    return out.getvalue().splitlines()


def strip(lines, label):
    (line,) = [line for line in lines if line.startswith(label)]
    return line.split("|")[1]


def test_letters_show_which_op_ran_when():
    lines = drawn(timeline([(0, 0, 0, 500, 0), (0, 1, 500, 1000, 0), (1, 1, 750, 1000, 0)]))
    first, second = strip(lines, "core 0"), strip(lines, "core 1")
    assert set(first[: len(first) // 2 - 1]) == {"U"}
    assert set(first[len(first) // 2 + 1 :]) == {"A"}
    assert second.count(" ") == pytest.approx(len(second) * 0.75, abs=1)


def test_waits_of_a_measured_run_are_dots_and_a_column():
    lines = drawn(timeline([(0, 0, 600, 1000, 600), (1, 0, 0, 1000, 0)], kind="measured"))
    cells = strip(lines, "core 0")
    assert cells.count(".") == pytest.approx(len(cells) * 0.6, abs=1)
    assert "60 %" in next(line for line in lines if line.startswith("core 0"))
    assert "waiting" in lines[-1]


def test_many_cores_are_grouped_by_kind_and_rank():
    cores = [
        f"r{rank} {kind} {n}" for rank in (0, 1) for kind, count in (("AIC", 24), ("AIV", 48)) for n in range(count)
    ]
    made = timeline([(core, 0, 0, 100, 0) for core in range(len(cores))], cores=cores)
    lines = drawn(made, width=100, most_rows=32)
    rows = [line for line in lines if "|" in line]
    assert len(rows) <= 32
    assert any(line.startswith("r0 AIC 0-") for line in rows)
    assert any("-47" in line and line.startswith("r1 AIV") for line in rows)


def test_case_of_a_letter_says_whether_most_of_a_group_works():
    cores = [f"AIC {n}" for n in range(4)]
    made = timeline([(0, 0, 0, 1000, 0), (1, 0, 0, 500, 0), (2, 0, 0, 500, 0)], cores=cores)
    cells = strip(drawn(made, most_rows=1), "AIC 0-3")
    assert cells[2] == "U"
    assert cells[-3] == "u"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width, colour):
    made = timeline([(0, 0, 0, 700, 0), (1, 1, 300, 1000, 300)], kind="measured")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    draw(made, ("cube", "vector"), console, title="a title")
    from rich.text import Text

    assert all(Text.from_ansi(line).cell_len <= width for line in out.getvalue().splitlines())


def test_colours_are_used_only_where_there_are_any():
    made = timeline([(0, 0, 0, 100, 0), (1, 1, 0, 100, 0)])
    assert "\x1b[" in "".join(drawn(made, colour=True))
    assert "\x1b[" not in "".join(drawn(made))


def test_the_axis_has_round_ticks_and_a_unit():
    lines = drawn(timeline([(0, 0, 0, 25_000_000, 0)]), width=80)
    figures = next(line for line in lines if " ms" in line and "predicted" not in line)
    assert figures.split()[:2] == ["0", "ms"]
    assert figures.split()[2:] == ["5", "10", "15", "20", "25"]


def test_a_timeline_without_tasks_is_drawn_empty():
    lines = drawn(timeline([]))
    assert strip(lines, "core 0").strip() == ""
