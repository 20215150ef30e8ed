"""The parts of the suite, from which ``--part`` of pytest chooses."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from harness import FRAMEWORKS, Job

__all__ = ["PARTS", "job_of", "params_of"]

#: The framework whose cases take the least time, of those that are tested.
FASTEST = next(name for name in ("torch", "jax", "tensorflow") if name in FRAMEWORKS)
#: The jobs of the quick part.
QUICK = (None, Job(2), Job(2, FASTEST))


def job_of(item: pytest.Item | None) -> Job | None:
    """The job that a test requests, if any."""
    job = params_of(item).get("job") if item else None
    return job if isinstance(job, Job) else None


def pure(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests without ranks."""
    return [item for item in items if job_of(item) is None and not _takes_long(item)]


def quick(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of at most two ranks and one framework."""
    return [item for item in items if job_of(item) in QUICK and not _takes_long(item)]


def _takes_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "nightly"))


def once(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Every test but nightly ones; a case that runs on several frameworks on one of them, mostly PyTorch, and whole
    programs on PyTorch alone.
    """
    items = [item for item in items if not item.get_closest_marker("nightly")]
    items = [item for item in items if _framework(item) == FASTEST or not item.get_closest_marker("program")]
    repeats: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        repeats[_without_framework(item)].append(item)
    chosen = {_chosen(same, zlib.crc32(repr(case).encode())) for case, same in repeats.items()}
    return [item for item in items if item in chosen]


def longer(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """All of ``once`` that ``quick`` leaves out."""
    items = list(items)
    left_out = set(quick(items))
    return [item for item in once(items) if item not in left_out]


def rest(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """All that ``quick`` and ``once`` leave out."""
    items = list(items)
    left_out = {*quick(items), *once(items)}
    return [item for item in items if item not in left_out]


def _chosen(same: Sequence[pytest.Item], number: int) -> pytest.Item:
    """Chooses from tests that differ in their framework alone by a number of the case, the same in every run.

    Those that start processes of their own run on PyTorch, so that all of a file share these; of others those on
    PyTorch, which take a tenth of the time, are chosen ten times as often.
    """
    fastest = [item for item in same if _framework(item) == FASTEST]
    if fastest and job_of(fastest[0]) is None:
        return fastest[0]
    choices = [*same, *9 * fastest]
    return choices[number % len(choices)]


def _framework(item: pytest.Item) -> str:
    job = job_of(item)
    return job.framework if job else str(params_of(item).get("framework", ""))


def _without_framework(item: pytest.Item) -> Hashable:
    """What tests have in common that differ in nothing but the framework."""
    if not _framework(item) or item.get_closest_marker("each_framework"):
        return item.nodeid
    job = job_of(item)
    others = {name: value for name, value in params_of(item).items() if name not in ("job", "framework")}
    job = replace(job, framework="", hidden=()) if job else None
    return item.location[0], item.name.partition("[")[0], repr(sorted(others.items())), job


def params_of(item: pytest.Item) -> Mapping[str, object]:
    """The parameters of a test."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


#: The parts by name.
PARTS: Mapping[str, Callable[[Iterable[pytest.Item]], list[pytest.Item]]] = {
    "pure": pure,
    "quick": quick,
    "once": once,
    "longer": longer,
    "rest": rest,
}
