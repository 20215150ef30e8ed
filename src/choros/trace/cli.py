"""The ``choros timeline`` command: reads a timeline, and prints where the time of a job went."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from choros.errors import ConfigError
from choros.observe.timeline import parts_directory
from choros.observe.verdict import aligned
from choros.trace.files import merge_parts, read_trace
from choros.trace.trace import BUCKETS, STEPS, Call, CallsOfCollective, Interval, Trace, collectives_of
from choros.wording import seconds_text, without_controls

_HELP = """\
Reads the timeline FILE of a job: what each rank did when.

\b
Record one:
  chorosrun -np 2 --timeline-filename run.json python train.py
  CHOROS_TIMELINE=run.json mpirun -np 2 python train.py     any other launcher, or none
  hvd.start_timeline("run.json"), hvd.stop_timeline()       a part of a job, on all ranks

\b
See it:
  open https://ui.perfetto.dev and drop the file there; it stays on your machine
  choros timeline run.json --summary

\b
The summary has three tables:
  ranks          computing: outside of collectives; waiting: in collectives until all ranks have called them;
                 transferring: the rest of these, in which data moves
  waited for     the rank that called a collective last is the one for which the others waited: how often,
                 the waits of all other ranks added up, the median and the longest of these waits
  collectives    those that took longest, by name; their times are added up over all ranks

If the job was killed before it could merge the ranks' parts (FILE.parts), this command merges them to FILE. With
--summary it writes nothing, and while the job runs, it shows what the ranks have done so far.
"""


@click.command(help=_HELP)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--summary", is_flag=True, help="Print where the time went and who waited for whom.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="With --summary: the number of collectives to list.",
)
def timeline(file: Path, summary: bool, top: int) -> int:  # fmt: skip
    """See ``_HELP``."""
    trace = trace_of(file, merge=not summary)
    if summary:
        click.echo(summary_text(trace, top), nl=False)
    else:
        ranks = "1 rank" if len(trace.ranks) == 1 else f"{len(trace.ranks)} ranks"
        click.echo(f"{file}: {ranks}, {len(trace.calls)} calls of collectives.")
        click.echo("Open it in https://ui.perfetto.dev, or add --summary.")
    return 0


def trace_of(file: Path, *, merge: bool = False) -> Trace:
    """Returns the trace in ``file``, after merging its parts to it on request; a ``ConfigError`` if there is none."""
    try:
        if merge:
            merge_parts(file)
        return read_trace(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: there is no such timeline, and no parts of one in {parts_directory(file)}. Record one with "
            f"chorosrun --timeline-filename {file}."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error


_MS, _S = 10**6, 10**9
_LONGEST_NAME = 48


@dataclass(frozen=True)
class RankTimes:
    """Where a rank's time went, in ns; ``waiting``: in collectives before all ranks had called them."""

    rank: int
    host: str
    recorded: int
    waiting: int
    transferring: int
    steps: int
    step: float | None

    @property
    def computing(self) -> int:
        """The time outside of collectives."""
        return self.recorded - self.waiting - self.transferring


@dataclass(frozen=True)
class WaitsForRank:
    """The others' waits, in ns, in collectives this rank called last; ``collective``: where they waited longest."""

    rank: int
    collectives: int
    total: int
    median: float
    longest: int
    collective: str


def summary_text(trace: Trace, most: int = 10) -> str:
    """Returns where the time of ``trace`` went, as tables, with ``most`` collectives or fewer in the last one."""
    times, waits, collectives = list(rank_times(trace)), waits_of(trace), collective_times(trace)
    recorded = max(each.recorded for each in times)
    ranks = "1 rank" if trace.size == 1 else f"{trace.size} ranks"
    if len(times) < trace.size:
        numbers = ", ".join(str(each.rank) for each in times)
        ranks += f", of which {len(times)} recorded ({numbers})"
    blocks = [f"{ranks}, {_time(recorded)}", _ranks_table(times)]
    if waits:
        total = sum(each.total for each in waits)
        share = f", {_share(waits[0].total, total)} of it for rank {waits[0].rank}" if total else ""
        blocks += [
            f"Ranks waited for each other {_time(total)}, added up over all ranks{share}.",
            _waits_table(waits),
        ]
    if collectives:
        blocks.append(_collectives_table(collectives[:most]))
        left = len(collectives) - most
        blocks += [f"and {left} more (--top)"] if left > 0 else []
    return "\n\n".join(blocks) + "\n"


def rank_times(trace: Trace) -> Iterator[RankTimes]:
    """Yields where the time of each rank went."""
    calls_of: defaultdict[int, list[Call]] = defaultdict(list)
    intervals_of: defaultdict[int, list[Interval]] = defaultdict(list)
    for call in trace.calls:
        calls_of[call.rank].append(call)
    for interval in trace.intervals:
        intervals_of[interval.rank].append(interval)
    for rank in trace.ranks:
        calls, intervals = calls_of[rank.rank], intervals_of[rank.rank]
        waiting = _union((call.began, call.began + call.wait) for call in calls)
        buckets = [(each.began, each.ended) for each in intervals if each.track == BUCKETS]
        busy = _union([*((call.began, call.ended) for call in calls), *buckets])
        begins = sorted(each.began for each in intervals if each.track == STEPS)
        times = [after - before for before, after in itertools.pairwise(begins)]
        yield RankTimes(
            rank.rank,
            rank.host,
            rank.ended - rank.began,
            waiting,
            busy - waiting,
            len(begins),
            median(times) if times else None,
        )


def waits_of(trace: Trace) -> list[WaitsForRank]:
    """Returns the waits for each rank, longest first."""
    waited_for: defaultdict[int, list[CallsOfCollective]] = defaultdict(list)
    for collective in collectives_of(trace.calls, [each.rank for each in trace.ranks]):
        if collective.last is not None:
            waited_for[collective.last].append(collective)
    found = []
    for rank, collectives in waited_for.items():
        named: defaultdict[str, list[int]] = defaultdict(list)
        for each in collectives:
            named[each.calls[0].name] += each.waits.values()
        waits = [wait for own in named.values() for wait in own]
        _, longest = max((sum(own), name) for name, own in named.items())
        found.append(WaitsForRank(rank, len(collectives), sum(waits), median(waits), max(waits), longest))
    return sorted(found, key=lambda each: -each.total)


def collective_times(trace: Trace) -> list[tuple[str, str, int, int, int, int]]:
    """Returns, of collectives by name and kind, how many there were, and of all ranks' calls the nanoseconds of waiting
    and of transferring and the bytes, added up; longest first.
    """
    named: defaultdict[tuple[str, str], list[tuple[int, int, int, int]]] = defaultdict(list)
    for collective in collectives_of(trace.calls):
        calls = collective.calls
        # A rank without batches takes part in what the others call under its own name.
        first = next((call for call in calls if call.collective != "join"), calls[0])
        sums = (sum(call.wait for call in calls), sum(call.transfer for call in calls))
        named[first.name, first.collective].append((1, *sums, sum(call.bytes or 0 for call in calls)))
    found = []
    for (name, kind), rows in named.items():
        times, waiting, transferring, sent = map(sum, zip(*rows, strict=True))
        found.append((name, kind, times, waiting, transferring, sent))
    return sorted(found, key=lambda each: -(each[3] + each[4]))


def _union(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of ``intervals``."""
    total = reached = 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _ranks_table(ranks: Sequence[RankTimes]) -> str:
    head = ["rank", "host", "recorded", "computing", "", "waiting", "", "transferring", ""]
    rows = [
        [
            str(each.rank),
            without_controls(each.host),
            _time(each.recorded),
            *(
                text
                for part in (each.computing, each.waiting, each.transferring)
                for text in (_time(part), _share(part, each.recorded))
            ),
        ]
        for each in ranks
    ]
    if any(each.steps for each in ranks):
        head += ["steps", "median step"]
        for row, each in zip(rows, ranks, strict=True):
            row += [str(each.steps), "" if each.step is None else _time(each.step)]
    return "\n".join(aligned([head, *rows], left={1}))


def _waits_table(waits: Sequence[WaitsForRank]) -> str:
    head = ["waited for", "times", "in all", "median", "longest", "most in"]
    rows = [
        [
            f"rank {each.rank}",
            str(each.collectives),
            _time(each.total),
            _time(each.median),
            _time(each.longest),
            _shortened(each.collective),
        ]
        for each in waits
    ]
    return "\n".join(aligned([head, *rows], left={0, 5}))


def _collectives_table(collectives: Sequence[tuple[str, str, int, int, int, int]]) -> str:
    head = ["collective", "kind", "times", "waiting", "transferring", "bytes"]
    rows = [
        [_shortened(name), _shortened(kind), str(times), _time(waiting), _time(transferring), f"{sent:,}"]
        for name, kind, times, waiting, transferring, sent in collectives
    ]
    return "\n".join(aligned([head, *rows], left={0, 1}))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _time(nanoseconds: float) -> str:
    return seconds_text(nanoseconds / _S)


def _shortened(name: str) -> str:
    name = " ".join(without_controls(name).split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
