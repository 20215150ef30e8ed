"""The pages: of a job, and of two jobs side by side."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from choros.durable import unfinished
from choros.errors import ConfigError
from choros.report.drawing import bytes_text, seconds_text
from choros.report.figures import figures_of, shown_ranks
from choros.report.numbers import collectives_of, numbers_of
from choros.report.record import WrittenRecord


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
