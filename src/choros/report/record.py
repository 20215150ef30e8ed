"""The record of a job as its page needs it: read from JSON, with times from the begin of the job on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from choros.errors import ConfigError
from choros.observe.progress import RECORD_FORMAT, SERIES, RankProgress
from choros.observe.verdict import Goodput

_GOODPUT = tuple(each.name for each in fields(Goodput))


@dataclass(frozen=True)
class Rank:
    """What a rank had done at ``times``, in seconds since the job began: ``series`` has a list for each number;
    ``progress``: in all.
    """

    number: int
    host: str
    pid: int
    times: Sequence[float]
    series: Mapping[str, Sequence[float]]
    progress: RankProgress

    @classmethod
    def of(cls, number: str, found: Mapping[str, Any], began: float) -> Rank:
        """That of a record's entry."""
        times = [float(each) - began for each in found["times"]]
        series = {name: [float(each) for each in found[name]] for name in SERIES}
        if any(len(each) != len(times) for each in series.values()):
            raise ValueError(f"rank {number} has lists of different lengths")
        last: dict[str, Any] = {name: values[-1] for name, values in series.items() if values}
        progress = RankProgress(
            int(number),
            **last,
            prompt_steps=int(found["prompt_steps"]),
            histogram=[int(each) for each in found["histogram"]],
            collectives={name: (int(calls), int(sent)) for name, (calls, sent) in found["collectives"].items()},
            last=str(found["last"]),
        )
        return cls(int(number), str(found["host"]), int(found["pid"]), times, series, progress)


@dataclass(frozen=True)
class WrittenRecord:
    """What a job has done; ``seconds``: how long it took, or has run. ``docs/report.md`` says what each name means."""

    command: Sequence[str]
    size: int
    began: float
    seconds: float
    code: int | None
    settings: Mapping[str, str]
    machine: Mapping[str, Any]
    goodput: Mapping[str, float] | None
    lines: Sequence[str]
    messages: Sequence[tuple[float, str]]
    ranks: Sequence[Rank]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> WrittenRecord:
        """That of a record as JSON has it; ``KeyError``, ``TypeError`` and others if it is none."""
        began = float(found["began"])
        ranks = [Rank.of(number, each, began) for number, each in found["ranks"].items()]
        lines = [str(each) for each in found["lines"]]
        messages = [(float(at) - began, str(text)) for at, text in found["messages"]]
        latest = [0.0, *(each.times[-1] for each in ranks if each.times), *(at for at, _ in messages)]
        return cls(
            command=[str(each) for each in found["command"]],
            size=int(found["size"]),
            began=began,
            seconds=max(latest) if found["ended"] is None else max(0.0, float(found["ended"]) - began),
            code=found["code"],
            settings=dict(found["settings"]),
            machine=dict(found["machine"]),
            goodput=None if found["goodput"] is None else {name: float(found["goodput"][name]) for name in _GOODPUT},
            lines=lines,
            messages=[each for each in messages if not _is_verdict(each[1], lines)],
            ranks=sorted(ranks, key=lambda each: each.number),
        )


def _is_verdict(message: str, lines: Sequence[str]) -> bool:
    """Whether chorosrun has shown the verdict by it; the goodput's seconds were others then."""
    return message.removeprefix("chorosrun: ") in lines or message.startswith("chorosrun: goodput ")


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
