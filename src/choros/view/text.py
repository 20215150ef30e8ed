"""Texts of what is shown: numbers, bars, curves. Pure."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from choros.observe.stragglers import PARTS
from choros.observe.verdict import aligned
from choros.view.snapshot import FitView, JobView

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def title(view: JobView) -> str:
    """What runs, where and since when."""
    hosts = len({rank.host for rank in view.ranks})
    where = f" on {hosts} hosts" if hosts > 1 else ""
    end = "" if view.code is None else f", ended with exit code {view.code}"
    return f"{view.size} rank{'s' * (view.size > 1)}{where}, {duration(view.seconds)}{end}: {view.command}"


def progress(fit: FitView) -> str:
    """How far ``fit`` is.

    >>> progress(FitView(2, 5, 120, 200, 0.32, 130.4))
    'epoch 2 of 5, batch 120 of 200, 32 %, 2:10 left'
    """
    parts = [f"epoch {fit.epoch}" + (f" of {fit.epochs}" if fit.epochs else "")]
    parts += [f"batch {fit.batch}" + (f" of {fit.batches}" if fit.batches else "")]
    parts += [f"{math.floor(100 * fit.done)} %"] if fit.epochs else []
    parts += [] if fit.left is None or fit.done >= 1 else [f"{duration(fit.left)} left"]
    return ", ".join(parts)


def rates(view: JobView) -> str:
    """Steps and examples of the whole job."""
    examples = f", {rate(view.examples_per_second)} examples/s" if view.examples_per_second else ""
    return f"{rate(view.steps_per_second)} steps/s{examples}"


def rate(number: float) -> str:
    """A number in a second.

    >>> rate(0.123), rate(12.34), rate(43210.9)
    ('0.12', '12.3', '43,211')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(59.6), duration(7261)
    ('1:00', '2:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size_of(memory: int) -> str:
    """Bytes, in GB or MB.

    >>> size_of(1_234_000_000), size_of(56_000_000)
    ('1.2 GB', '56 MB')
    """
    return f"{memory / 1e9:.1f} GB" if memory >= 1e9 else f"{memory / 1e6:.0f} MB"


def bar(share: float, width: int) -> str:
    """A bar of ``width`` cells, of which a share is full.

    >>> bar(0.5, 5)
    '██▌  '
    """
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


def cells(shares: Mapping[str, float], width: int) -> Mapping[str, int]:
    """How many of ``width`` cells each part has: in all exactly so many.

    >>> cells({"computing": 0.5, "waiting": 0.5}, 5)
    {'computing': 3, 'waiting': 2}
    """
    total, ends, ended = sum(shares.values()), [0], 0.0
    for share in shares.values():
        ended += share
        ends.append(math.floor(width * ended / total + 0.5))
    return {name: ends[place + 1] - ends[place] for place, name in enumerate(shares)}


def curve(values: Sequence[float], width: int) -> str:
    """The values over time as a line of at most ``width`` characters, of which each is the mean of some.

    >>> curve([4, 3, 2, 1], 4), curve([1, 1, 2, 2], 2), curve([5], 4), curve([float("nan"), 1], 2)
    ('█▆▃▁', '▁█', '▁', '×▁')
    """
    width = min(width, len(values))
    edges = [round(place * len(values) / width) for place in range(width + 1)] if width else []
    means = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
    finite = [each for each in means if math.isfinite(each)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    highest = len(_HEIGHTS) - 1
    return "".join(
        _HEIGHTS[min(highest, round(highest * (each - low) / span))] if math.isfinite(each) else "×" for each in means
    )


def table(view: JobView) -> str:
    """All of it as plain lines, for a pipe."""
    lines = [title(view)]
    lines += [progress(view.fit)] if view.fit else []
    lines += [rates(view)]
    lines += [", ".join(f"{name} {values[-1]:.4g}" for name, values in view.metrics.items())] if view.metrics else []
    rows = [["rank", "host", "steps", "steps/s", "examples/s", *PARTS, "memory"]]
    for rank in view.ranks:
        shares = [f"{rank.shares[name]:.0%}" if rank.shares else "-" for name in PARTS]
        examples = rate(rank.examples_per_second) if rank.examples_per_second else "-"
        counts = [str(rank.steps), rate(rank.steps_per_second), examples]
        rows.append([str(rank.number), rank.host, *counts, *shares, size_of(rank.memory)])
    lines += [*aligned(rows, left=()), *view.verdict, *view.messages[-5:], *view.output[-5:]]
    return "\n".join(lines)
