"""Links, as users describe them: by figures, by name, or by measured allreduces, to which α and β are fitted with which
the costs of the model are nearest to them.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from choros.bench.contender import CHOROS
from choros.bench.figures import nearest
from choros.errors import ConfigError
from choros.forecast.costs import Link, Machines, allreduce_s, control_s

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|ns)", re.IGNORECASE)

#: What programs get of the links that are rented: of Ethernet 94%, as TCP's and its own headers take the rest.
PROFILES = {
    name: Link(name, latency_us * 1e-6, gbits * 1e9 / 8)
    for name, gbits, latency_us in (
        ("ethernet-1", 0.94, 50),
        ("ethernet-10", 9.4, 30),
        ("ethernet-25", 23.5, 20),
        ("ethernet-100", 94, 15),
        ("infiniband", 190, 2),
        ("nvlink", 2400, 3),
    )
}


def parse_link(option: str, text: str) -> Link:
    """Returns the link that ``text`` describes: BANDWIDTH,LATENCY or the name of a profile.

    >>> parse_link("--net", "10Gbit,20us")
    Link(name='10Gbit,20us', latency_s=2e-05, bytes_per_s=1250000000.0)
    >>> parse_link("--net", "infiniband").latency_s
    2e-06
    """
    if text in PROFILES:
        return PROFILES[text]
    bandwidth, _, latency = text.partition(",")
    rate, delay = _BANDWIDTH.fullmatch(bandwidth.strip()), _LATENCY.fullmatch(latency.strip())
    if rate is None or delay is None or float(rate[1]) == 0:
        raise ConfigError(
            f"{option} {text}: expected BANDWIDTH,LATENCY, such as 10Gbit,20us; one of {', '.join(PROFILES)}; or a "
            "file that choros bench allreduce --json has written."
        )
    return Link(text, float(delay[1]) / _IN_A_SECOND[delay[2].lower()], float(rate[1]) * _BITS[rate[2].lower()] / 8)


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
