"""Links that are fitted to measured allreduces: the α and β with which the costs of the model are nearest to them."""

import json
from collections.abc import Sequence
from pathlib import Path

from choros.bench.contender import CHOROS
from choros.bench.figures import nearest
from choros.errors import ConfigError
from choros.forecast.costs import Machines, allreduce_s, control_s
from choros.forecast.links import Link, parse_link


def link_of(option: str, text: str) -> Link:
    """Returns the link that ``text`` describes, or that fits a file of ``choros bench allreduce --json``."""
    if not text.endswith(".json"):
        return parse_link(option, text)
    try:
        rows = json.loads(Path(text).read_bytes())["rows"]
        chosen = [row for row in rows if (row["bench"], row["peer"]) == ("allreduce", CHOROS) and row["ranks"] > 1]
        most = max((row["ranks"] for row in chosen), default=0)
        points = [(int(row["bytes"]), float(row["median_s"])) for row in chosen if row["ranks"] == most]
        if any(number <= 0 for point in points for number in point):
            raise ValueError("a size or a time is not above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{option} {text}: it is no file of choros bench allreduce --json: {error!r}.") from error
    link = fit_link(text, most, [size for size, _ in points], [seconds for _, seconds in points])
    if link is None:
        raise ConfigError(
            f"{option} {text}: a fit needs allreduces of two sizes or more on two ranks or more, which differ in their "
            "time. Measure them: choros bench allreduce --ranks 2 --sizes 4KiB..64MiB --json FILE."
        )
    return link


def fit_link(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> Link | None:
    """Returns the link that fits allreduces of ``sizes`` bytes by ``ranks`` best, by least squares of relative errors;
    ``None``: they do not say.

    >>> slow = Machines(Link("", 0.001, 1e6), Link("", 0, 1))
    >>> sizes = [1000, 10**6]
    >>> link = fit_link("", 2, sizes, [control_s(2, slow) + allreduce_s(2, size, slow) for size in sizes])
    >>> round(link.latency_s, 4), round(link.bytes_per_s, -3)
    (0.001, 1000000.0)
    """
    if ranks < 2 or len(set(sizes)) < 2:
        return None
    latency, byte = (Machines(link, link) for link in (Link("", 1.0, float("inf")), Link("", 0.0, 1.0)))
    rows = [
        [control_s(ranks, latency) + allreduce_s(ranks, size, latency), allreduce_s(ranks, size, byte)]
        for size in sizes
    ]
    alpha, beta = nearest(rows, seconds)
    if beta <= 0:
        return None
    text = f"{name}: fitted to {ranks} ranks: α = {alpha * 1e6:.3g} µs, β = {beta * 1e9:.3g} ns a byte"
    return Link(text, alpha, 1 / beta)
