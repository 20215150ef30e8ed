"""The pages: of a job, and of two jobs side by side, with their main numbers and how these differ."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choros.durable import unfinished
from choros.errors import ConfigError
from choros.observe.stragglers import PARTS
from choros.observe.verdict import means_of, members_of, number_text, percent_text
from choros.report.drawing import bytes_text, seconds_text
from choros.report.figures import figures_of, shown_ranks
from choros.report.record import WrittenRecord


@dataclass(frozen=True)
class Number:
    """A number of a job, ``None`` if it has none; ``write`` makes a text of it."""

    value: float | None
    write: Callable[[float], str]

    @property
    def is_share(self) -> bool:
        """Whether it is written in percent."""
        return self.write is percent_text

    def __str__(self) -> str:
        return "–" if self.value is None else self.write(self.value)


def numbers_of(record: WrittenRecord) -> Mapping[str, Number]:
    """The main numbers, by name: means over the ranks that made at least half of the steps, as in the verdict."""
    progress = [rank.progress for rank in record.ranks]
    members = [each for each in members_of(progress) if each.seconds > 0]
    step, examples, shares = means_of(members) if members else (None, None, {})
    found = {
        "time": Number(record.seconds, seconds_text),
        "ranks": Number(len(record.ranks), number_text),
        "steps": Number(max((each.steps for each in progress), default=0), number_text),
        "a step": Number(step, seconds_text),
        "steps/s": Number(1 / step if step else None, number_text),
        "examples/s": Number(examples or None, number_text),
        **{text: Number(shares.get(name), percent_text) for name, text in PARTS.items()},
    }
    memory = max((each for rank in record.ranks for each in rank.series["memory"]), default=0.0)
    found["goodput"] = Number(None if record.goodput is None else record.goodput["steps"], percent_text)
    found["memory of a rank, at most"] = Number(memory or None, bytes_text)
    sent = sum(each[2] for each in collectives_of(record))
    found["given to collectives"] = Number(sent or None, bytes_text)
    return found


def collectives_of(record: WrittenRecord) -> list[tuple[str, int, int]]:
    """The collectives of all ranks: names, how many there were, and their bytes; those with most bytes first."""
    total: dict[str, tuple[int, int]] = {}
    for rank in record.ranks:
        for name, (calls, sent) in rank.progress.collectives.items():
            before = total.get(name, (0, 0))
            total[name] = (before[0] + calls, before[1] + sent)
    return sorted(((name, *each) for name, each in total.items()), key=lambda each: (-each[2], each[0]))


def difference(first: Number, second: Number) -> str:
    """By how much the second job's number differs: in points, if it is a share.

    >>> difference(Number(10.0, number_text), Number(12.5, number_text))
    '+25 %'
    >>> difference(Number(0.5, percent_text), Number(0.1, percent_text))
    '-40 points'
    """
    before, after = first.value, second.value
    if before is None or after is None:
        return "–"
    if first.is_share:
        return f"{100 * (after - before):+.0f} points"
    return f"{100 * (after / before - 1):+.0f} %" if before else "–"


def differences(first: WrittenRecord, second: WrittenRecord) -> list[tuple[str, str, str, str]]:
    """The main numbers that one of the two jobs has: its name, both, and by how much the second one differs."""
    ours, theirs = numbers_of(first), numbers_of(second)
    rows = [(name, str(ours[name]), str(theirs[name]), difference(ours[name], theirs[name])) for name in ours]
    return [row for row in rows if not set(row[1:3]) <= {"–", "0", "0 %"}]


def page_of(record: WrittenRecord) -> str:
    """The page about a job."""
    numbers = {name: each for name, each in numbers_of(record).items() if each.value and not each.is_share}
    return _rendered(
        "job.html",
        job=record,
        figures=figures_of(record),
        numbers=numbers,
        ranks=shown_ranks(record),
        collectives=collectives_of(record),
    )


def comparison_of(jobs: Sequence[WrittenRecord], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The page about two jobs; ``rows``: their ``differences``."""
    pairs = list(zip(*(figures_of(job) for job in jobs), strict=True))
    return _rendered("comparison.html", jobs=jobs, names=names, rows=rows, pairs=pairs)


def write_page(file: Path, page: str) -> None:
    """Writes a page; what is no text, such as names of files in other encodings, becomes question marks."""
    with unfinished(file) as name:
        name.write_text(page, encoding="utf-8", errors="replace")


def _rendered(template: str, **values: Any) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError("a report's page needs Jinja2: pip install 'choros[report]'") from error
    environment = Environment(
        loader=PackageLoader("choros.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds_text, "bytes": bytes_text, "date": _date, "command": shlex.join}
    return environment.get_template(template).render(values)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
