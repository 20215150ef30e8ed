"""The job's numbers for Prometheus (``--metrics-port``): what ``JobRecord`` has, made when it asks for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from choros.errors import ConfigError
from choros.launch.driver.job_record import JobRecord
from choros.observe.progress import BUCKETS, limit_of
from choros.observe.stragglers import PARTS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_ADDRESS = re.compile(r"(?:(?P<host>.+):)?(?P<port>\d{1,5})")


def _parsed(text: str) -> tuple[str, int]:
    """The address and the port in ``text``.

    >>> _parsed("9100"), _parsed("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"--metrics-port {text}: expected a port, such as 9100, which only this machine can reach, or an address "
            "and a port, such as 0.0.0.0:9100."
        )
    return (match["host"] or "127.0.0.1").strip("[]"), int(match["port"])


@contextmanager
def served(record: JobRecord, text: str | None, show: Callable[[str], None]) -> Iterator[None]:
    """A context in which Prometheus finds the job's numbers at the address ``text``, if there is one."""
    if text is None:
        yield
        return
    host, port = _parsed(text)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigError(f"--metrics-port {text} needs a package: pip install 'choros[metrics]' ({error}).") from error
    registry = CollectorRegistry()
    registry.register(_Collector(record))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {text}: {host}:{port} cannot be opened: {error}.") from error
    shown = f"[{host}]" if ":" in host else host
    show(f"chorosrun: metrics at http://{shown}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@final
class _Collector:
    def __init__(self, record: JobRecord) -> None:
        self._record = record

    def collect(self) -> Iterator[Metric]:
        """The job's numbers now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        ranks = [(str(number), rank) for number, rank in sorted([*self._record.ranks.items()])]
        for name, what, value in (
            ("choros_steps", "Training steps.", "steps"),
            ("choros_examples", "Examples trained on; in loops of PyTorch, batches.", "examples"),
            ("choros_pause_seconds", "Seconds between epochs.", "pausing"),
        ):
            counter = CounterMetricFamily(name, what, labels=["rank", "host"])
            for number, rank in ranks:
                counter.add_metric([number, rank.host], getattr(rank.last, value))
            yield counter
        seconds = CounterMetricFamily("choros_step_part_seconds", "Seconds in steps.", labels=["rank", "host", "part"])
        memory = GaugeMetricFamily("choros_memory_bytes", "Resident memory.", labels=["rank", "host"])
        steps = HistogramMetricFamily("choros_step_seconds", "Seconds of a step.", labels=["rank", "host"])
        for number, rank in ranks:
            for part in PARTS:
                seconds.add_metric([number, rank.host, part], getattr(rank.last, part))
            memory.add_metric([number, rank.host], rank.last.memory)
            buckets, total = [], 0
            for place, count in enumerate(rank.last.histogram):
                total += count
                buckets.append(("+Inf" if place == BUCKETS - 1 else f"{limit_of(place):.6g}", float(total)))
            if buckets:
                steps.add_metric([number, rank.host], buckets, sum_value=rank.last.seconds)
        yield from (seconds, memory, steps)
        yield GaugeMetricFamily("choros_ranks", "Ranks that have started.", value=len(ranks))
