"""The record of a job, for ``--report`` and ``choros top``, as JSON, also while it runs: what its ranks did over time,
how far ``fit`` is, both noted once a second, and chorosrun's messages and output; and what Prometheus reads of it.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from choros import durations
from choros.durable import unfinished
from choros.errors import ConfigError
from choros.launch.protocol.frames import Start
from choros.observe.events import Event
from choros.observe.progress import BUCKETS, PARTS, RECORD_FORMAT, SERIES, RankProgress, limit_of
from choros.observe.verdict import goodput_of, goodput_text, verdict_of, verdict_text
from choros.settings import VARIABLES
from choros.wording import ranks_text, without_controls

if TYPE_CHECKING:
    import socket

    from prometheus_client.core import Metric


#: With more moments than this, every second one is dropped, and later ones are as far apart.
_MOST = 600
_MOST_MESSAGES = 1000
#: The last bytes of the output.
_MOST_OUTPUT = 1 << 14
#: How many may read the job's numbers at a time.
_MOST_READERS = 16
_Noted = TypeVar("_Noted")


@dataclass(eq=False)
class Moments(Generic[_Noted]):
    """What was noted when, in seconds since 1970: the last, and of the others at most one in ``apart`` seconds."""

    apart: float = 0.0
    noted: list[tuple[float, _Noted]] = field(default_factory=list)

    def note(self, what: _Noted, now: float) -> None:
        """Adds what is so ``now``."""
        if len(self.noted) > 1 and now - self.noted[-2][0] < self.apart:
            self.noted.pop()
        self.noted.append((now, what))
        if len(self.noted) > _MOST:
            del self.noted[1::2]
            self.apart = max(1.0, 2 * self.apart)


@dataclass(eq=False)
class RankRecord:
    """What one rank has done over time."""

    host: str = ""
    pid: int = 0
    moments: Moments[RankProgress] = field(default_factory=Moments)

    @property
    def last(self) -> RankProgress:
        """What it has done until now."""
        return self.moments.noted[-1][1] if self.moments.noted else RankProgress(-1)

    def to_json(self, moments: int | None = None) -> dict[str, Any]:
        """It as JSON has it: a list for each number, of all moments, or of the last ones."""
        noted = self.moments.noted[-moments:] if moments else self.moments.noted
        series = {name: [round(getattr(done, name), 4) for _, done in noted] for name in SERIES}
        last = {name: value for name, value in asdict(self.last).items() if name not in SERIES}
        times = [round(at, 3) for at, _ in noted]
        return {"host": self.host, "pid": self.pid, **last, "computing": self.last.computing, "times": times, **series}


@dataclass(eq=False)
class JobRecord:
    """The record of the job that runs ``command`` on ``size`` ranks with these variables; it has begun now."""

    command: Sequence[str]
    size: int
    environment: Mapping[str, str]
    began: float = field(default_factory=time.time)
    ended: float | None = None
    code: int | None = None
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    messages: list[tuple[float, str]] = field(default_factory=list)
    metrics: Moments[Mapping[str, Any]] = field(default_factory=Moments)
    output: bytes = b""

    def start(self, start: Start) -> None:
        """Records where a rank runs."""
        rank = self.ranks.setdefault(start.rank, RankRecord())
        rank.host, rank.pid = start.host, start.pid

    def note(self, done: RankProgress) -> None:
        """Records what a rank has done until now."""
        self.ranks.setdefault(done.rank, RankRecord()).moments.note(done, time.time())

    def show(self, message: str) -> None:
        """Records a message of chorosrun."""
        if len(self.messages) < _MOST_MESSAGES:
            self.messages.append((round(time.time(), 3), message))

    def print(self, data: bytes) -> None:
        """Records what is written to the screen."""
        self.output = (self.output + data)[-_MOST_OUTPUT:]

    def note_metrics(self, event: Event) -> None:
        """Records how far ``fit`` is, as rank 0 says it."""
        logs = event.details.get("logs")
        values = logs if isinstance(logs, dict) else {}  # without: they were too many for one event
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.metrics.note({**event.details, "logs": finite}, event.time)

    def end(self, code: int) -> None:
        """Records the end, and chorosrun's exit code."""
        self.ended, self.code = time.time(), code

    def to_json(self, moments: int | None = None) -> dict[str, Any]:
        """The record as JSON has it (``docs/report.md``), with all moments of the ranks, or their last ones."""
        progress = [rank.last for _, rank in sorted(self.ranks.items()) if rank.last.rank >= 0]
        ended = self.ended or time.time()
        verdict = verdict_of(progress)
        goodput = {} if verdict is None else goodput_of(progress, self.began, ended)
        return {
            "format": RECORD_FORMAT,
            "command": list(self.command),
            "size": self.size,
            "began": self.began,
            "ended": self.ended,
            "code": self.code,
            # Not all variables: some may be secret, as one of these is.
            "settings": {
                each.name: self.environment[each.name]
                for setting, each in VARIABLES.items()
                if each.name in self.environment and setting != "secret"
            },
            "machine": {"host": os.uname().nodename, "cores": os.cpu_count(), "system": os.uname().release},
            "verdict": None if verdict is None else asdict(verdict),
            "goodput": goodput or None,
            "lines": [] if verdict is None else [*verdict_text(verdict, ranks_text), goodput_text(goodput)],
            "messages": self.messages,
            "output": screen_lines(self.output),
            "metrics": [{"time": round(at, 3), **values} for at, values in self.metrics.noted],
            "ranks": {str(number): rank.to_json(moments) for number, rank in sorted(self.ranks.items())},
        }

    def collect(self) -> Iterator[Metric]:
        """The job's numbers now, for Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        ranks = [(str(number), rank) for number, rank in sorted([*self.ranks.items()])]
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

    def write(self, file: Path, page: Path, show: Callable[[str], None]) -> None:
        """Writes the record to ``file``, and its page; if one cannot be written, ``show`` says so."""
        from choros.report.page import WrittenRecord, page_of, write_page  # takes 50 ms, for jobs with a report

        try:
            record = self.to_json()
            with unfinished(file) as name:
                name.write_text(json.dumps(record))
            write_page(page, page_of(WrittenRecord.of(record)))
        except Exception as error:  # noqa: BLE001 – whatever it is, the exit code is the job's
            show(f"chorosrun: the report {page} cannot be written: {error}.")


def screen_lines(data: bytes) -> list[str]:
    """The lines that a screen shows of ``data``, without colours; of a progress bar, as it is last.

    >>> screen_lines(b"1 %\\r2 %\\n\\x1b[31mdone\\x1b[0m\\n")
    ['2 %', 'done']
    """
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    shown = [without_controls(line.rstrip("\r").rpartition("\r")[2]).expandtabs() for line in lines]
    return shown if shown[-1] else shown[:-1]


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


def _limit_readers(server: Any) -> None:
    """Lets a few read at a time, none of which may be slow: any user of this machine can connect, and say nothing."""
    free, begin = threading.BoundedSemaphore(_MOST_READERS), server.process_request

    def begin_if_free(request: socket.socket, address: Any) -> None:
        if not free.acquire(blocking=False):
            server.shutdown_request(request)
            return
        request.settimeout(durations.METRICS_READ)
        try:
            begin(request, address)
        except RuntimeError:  # too many threads
            free.release()
            raise

    def serve(request: socket.socket, address: Any) -> None:
        try:
            with suppress(OSError):  # it is too slow, or has gone
                server.finish_request(request, address)
        finally:
            server.shutdown_request(request)
            free.release()

    server.process_request, server.process_request_thread = begin_if_free, serve


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
    registry.register(record)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {text}: {host}:{port} cannot be opened: {error}.") from error
    _limit_readers(server)
    shown = f"[{host}]" if ":" in host else host
    show(f"chorosrun: metrics at http://{shown}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
