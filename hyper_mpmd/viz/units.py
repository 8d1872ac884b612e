"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def digits(value: float) -> str:
    """Three significant digits, without an exponent: 3.41, 34.1, 341, 3410."""
    if value == 0:
        return "0"
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{places}f}"


def time_unit(ns: float) -> tuple[float, str]:
    """(nanoseconds of the unit, its name) in which this time reads best."""
    return next(((size, name) for size, name in _TIMES if abs(ns) >= size), _TIMES[-1])


def duration(ns: float) -> str:
    """3.41 ms"""
    size, name = time_unit(ns)
    return f"{digits(ns / size)} {name}"


def size(count: float) -> str:
    """12.0 MiB"""
    for step, name in _BYTES:
        if count >= step:
            return f"{digits(count / step)} {name}"
    return f"{int(count)} B"


def quantity(value: float, unit: str) -> str:
    """4.29 GFLOP"""
    for step, prefix in _THOUSANDS:
        if value >= step:
            return f"{digits(value / step)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


def percent(share: float) -> str:
    """87 %"""
    return f"{share * 100:.0f} %"
