"""Drawings as SVG, from numbers: pure functions. Colours are classes, ``c0`` to ``c7``, that the page's style sets."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from choros.wording import bytes_text

#: A point of a line: seconds, and a number; ``None`` ends a part of the line.
Point = tuple[float, float] | None
Text = Callable[[float], str]

_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 380, 12, 182
COLOURS = 8
#: A value beyond so many times what nearly all values are at most is cut off.
_BEYOND = 3


def lines(label: str, series: Mapping[str, Sequence[Point]], number: Text, end: float, marks: Sequence[float]) -> str:
    """Lines over the time until ``end``, with ``marks`` on its axis; up to ``COLOURS`` have colours of their own."""
    top = highest(point[1] for points in series.values() for point in points if point)
    many = len(series) > COLOURS
    drawn = [_rows(top, number), _times(end)]
    drawn += [f'<path class="mark" d="M{_across(at, end):.1f} {_TOP}V{_BOTTOM}"/>' for at in marks if 0 <= at <= end]
    for place, (name, points) in enumerate(series.items()):
        kind = "c0 many" if many else f"c{place}"
        path = _path(points, end, top)
        drawn.append(f'<path class="line {kind}" d="{path}"><title>{escape(name)}</title></path>')
    return _svg(label, "".join(drawn))


def columns(label: str, names: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]], number: Text) -> str:
    """Columns with ``names`` below; ``parts``, from below: the class of the colour, and its height in each column."""
    sums = [sum(heights) for heights in zip(*(values for _, values in parts), strict=True)]
    top = max(sums, default=0.0) or 1.0
    wide = (_RIGHT - _LEFT) / max(len(names), 6)
    drawn, below = [_rows(top, number)], [0.0] * len(names)
    for kind, values in parts:
        for place, value in enumerate(values):
            if value > 0:
                high = max(1.0, _BOTTOM - _up(value, top))
                x, y = _LEFT + place * wide, _up(below[place], top) - high
                drawn.append(_area(f"area {kind}", x, y, 0.86 * wide, high))
                below[place] += value
    drawn += [
        _text(_LEFT + (place + 0.43) * wide, _BOTTOM + 18, names[place], "middle") for place in _labelled(names, wide)
    ]
    return _svg(label, "".join(drawn))


def matrix(label: str, names: Sequence[str], rows: Sequence[Sequence[float]], number: Text) -> str:
    """A square of cells, the darker the larger their numbers; these stand in them if there is room."""
    size = (_RIGHT - _LEFT) / max(len(names), 3)
    top = max((value for row in rows for value in row), default=0.0) or 1.0
    drawn = []
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if value < 0.01 * top and i != j and size < 40:
                continue
            x, y = _LEFT + j * size, _TOP + 14 + i * size
            drawn.append(_area("none" if i == j else "cell", x, y, size, size, opacity=0.06 + 0.5 * value / top))
            if size >= 40 and i != j:
                drawn.append(_text(x + size / 2, y + size / 2 + 4, number(value), "middle"))
    for place in _labelled(names, size):
        drawn.append(_text(_LEFT + (place + 0.5) * size, _TOP + 8, names[place], "middle"))
        drawn.append(_text(_LEFT - 6, _TOP + 18 + (place + 0.5) * size, names[place], "end"))
    return _svg(label, "".join(drawn), height=int(_TOP + 20 + len(names) * size))


def bar(label: str, parts: Sequence[tuple[str, float]]) -> str:
    """One bar, of parts that are shares: the class of the colour, and the share."""
    x, drawn = 0.0, []
    for kind, share in parts:
        drawn.append(_area(f"area {kind}", x, 4, share * _WIDTH, 40))
        x += share * _WIDTH
    return _svg(label, "".join(drawn), height=48)


def highest(values: Iterable[float]) -> float:
    """The end of an axis for values: the largest, or less if few are far beyond all others.

    >>> highest([1.0, 2.0]), highest([1.0] * 99 + [50.0]), highest([])
    (2.0, 3.0, 1.0)
    """
    ordered = sorted(values)
    if not ordered or ordered[-1] <= 0:
        return 1.0
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return min(ordered[-1], _BEYOND * usual) if usual > 0 else ordered[-1]


def ticks(top: float, *, binary: bool = False) -> list[float]:
    """Round numbers from 0 to ``top``, four steps or fewer; of bytes, which are ``binary``, powers of two apart.

    >>> ticks(1.0), ticks(730), ticks(730, binary=True)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0, 200, 400, 600], [0, 256, 512])
    """
    power = 10 ** math.floor(math.log10(top / 4))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= top / 4.001)
    step = 2 ** math.ceil(math.log2(top / 4.001)) if binary else step
    return [number * step for number in range(int(top / step * 1.001) + 1)]


def _svg(label: str, drawn: str, *, height: int = _HEIGHT) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height}">{drawn}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _area(kind: str, x: float, y: float, wide: float, high: float, *, opacity: float = 1) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect class="{kind}" {shape} fill-opacity="{opacity:.2g}"/>'


def _across(seconds: float, end: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * seconds / (end or 1.0)


def _up(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * min(1.0, value / top)


def _path(points: Sequence[Point], end: float, top: float) -> str:
    path, joined = [], False
    for point in points:
        if point:
            place = f"{_across(point[0], end):.1f} {_up(point[1], top):.1f}"
            path.append(f"L{place}" if joined else f"M{place}h0")
        joined = point is not None
    return "".join(path)


def _rows(top: float, number: Text) -> str:
    """The lines and numbers of the axis upwards."""
    drawn = []
    for each in ticks(top, binary=number is bytes_text):
        y = _up(each, top)
        drawn.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>' + _text(_LEFT - 6, y + 4, number(each), "end")
        )
    return "".join(drawn)


def _times(end: float) -> str:
    """The numbers of the axis of time, all in one unit."""
    size, unit = (3600, "h") if end >= 7200 else (60, "min") if end >= 120 else (1, "s")
    places = ticks((end or 1.0) / size)
    return "".join(
        _text(_across(each * size, end), _BOTTOM + 18, f"{each:g} {unit}" if each else "0", "middle") for each in places
    )


def _labelled(names: Sequence[str], wide: float) -> range:
    """The places of the names that have room."""
    room = 8 * max(map(len, names), default=1) + 6
    return range(0, len(names), max(1, math.ceil(room / wide)))
