"""The ``choros report`` command: reads records, and prints; the other modules of this package do the work."""

import json
from pathlib import Path

import click

from choros.errors import ConfigError
from choros.observe.progress import RECORD_FORMAT
from choros.observe.verdict import aligned
from choros.report.page import WrittenRecord, comparison_of, differences, page_of, write_page

_HELP = """\
Makes the page about a job from its record, which chorosrun --report has written; or compares two jobs.

\b
Examples:
  chorosrun -np 4 --report run.html python train.py     writes run.html and run.json
  choros report run.json                                makes run.html again
  choros report --compare before.json after.json        prints how their numbers differ, and
                                                        writes before-after.html
"""
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(help=_HELP)
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE.json...")
@click.option("--compare", is_flag=True, help="Show two jobs side by side.")
@click.option("-o", "--output", type=_FILE, metavar="FILE.html", help="The page. Default: beside the first record.")
def report(files: tuple[Path, ...], compare: bool, output: Path | None) -> int:
    """See ``_HELP``."""
    if len(files) != 1 + compare:
        given = "1 file was" if len(files) == 1 else f"{len(files)} files were"
        raise click.UsageError(f"{given} given: choros report FILE.json, or choros report --compare A.json B.json")
    jobs = [read_record(file) for file in files]
    names = [file.stem for file in files]
    page = files[0].with_name("-".join(names) + ".html") if output is None else output
    if len(set(names)) < len(names):
        names = [str(file.with_suffix("")) for file in files]
    if page.exists() and any(page.samefile(file) for file in files):
        raise ConfigError(f"{page} is the record itself, and would be lost: name another file with -o FILE.html.")
    if compare:
        rows = differences(jobs[0], jobs[1])
        click.echo("\n".join(aligned([("", *names, "difference"), *rows])))
        text = comparison_of(jobs, names, rows)
    else:
        text = page_of(jobs[0])
    try:
        write_page(page, text)
    except OSError as error:
        advice = "Name a file in an existing, writable directory with room: -o FILE.html."
        raise ConfigError(f"{page} cannot be written: {error.strerror}. {advice}") from error
    click.echo(f"{page} is written: open it in a browser.")
    return 0


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def read_record(file: Path) -> WrittenRecord:
    """Reads a record that ``--report`` has written; a ``ConfigError`` if the file is none, or of another format."""
    advice = "Give the FILE.json that chorosrun --report FILE.html has written."
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
        given = found["format"]
        if given == RECORD_FORMAT:
            return WrittenRecord.of(found)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. {advice}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is no record of a job: {type(error).__name__}: {error}. {advice}") from error
    raise ConfigError(
        f"{file} is a record of format {given!r}; this choros reads format {RECORD_FORMAT}. Use the version of choros "
        "that has written it."
    )
