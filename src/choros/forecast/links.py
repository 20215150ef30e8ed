"""Links: a message of n bytes takes ``α + n β`` (Hockney 1994; LogP, Culler et al. 1993, has the same parts)."""

import re
from dataclasses import dataclass

from choros.errors import ConfigError

#: Larger messages begin with a request and an answer: Open MPI's eager limit on TCP.
_EAGER_BYTES = 64 << 10
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|ns)", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """A full-duplex link of each host, or rank, to all others; ``name``: where its figures are from.

    >>> link = Link("slow", latency_s=0.001, bytes_per_s=1e6)
    >>> round(link.message(1000), 6), round(link.message(1_000_000), 6)
    (0.002, 1.003)
    """

    name: str
    latency_s: float
    bytes_per_s: float

    def message(self, nbytes: float) -> float:
        """The seconds from the call to the arrival: a large message waits for the receiver's answer."""
        return (3 if nbytes > _EAGER_BYTES else 1) * self.latency_s + nbytes / self.bytes_per_s


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
