"""The parts of the suite, from which ``--part`` of pytest chooses."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import pytest

from ranks.job import Job

__all__ = ["PARTS", "job_of"]

#: The jobs of the quick part: two ranks without a framework, and with the one that is imported fastest.
QUICK = (None, Job(2), Job(2, "torch"))


def job_of(item: pytest.Item | None) -> Job | None:
    """The job that a test requests, if any."""
    callspec = getattr(item, "callspec", None)
    job = callspec.params.get("job") if callspec else None
    return job if isinstance(job, Job) else None


def pure(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests without ranks."""
    return [item for item in items if job_of(item) is None and not item.get_closest_marker("slow")]


def quick(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of at most two ranks and one framework."""
    return [item for item in items if job_of(item) in QUICK and not item.get_closest_marker("slow")]


def rest(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """All that the quick part leaves out."""
    items = list(items)
    left_out = set(quick(items))
    return [item for item in items if item not in left_out]


def once(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Every test, but a case that runs on several frameworks on one of them; the frameworks share the cases."""
    items = list(items)
    repeats: dict[Repeated, list[pytest.Item]] = defaultdict(list)
    for item in items:
        repeats[_repeated(item)].append(item)
    chosen = {same[zlib.crc32(test.share.encode()) % len(same)] for test, same in repeats.items()}
    return [item for item in items if item in chosen]


@dataclass(frozen=True)
class Repeated:
    """What tests have in common that differ in nothing but the framework.

    Attributes:
        test: identifies them.
        share: tests with the same share run on the same framework.
    """

    test: Hashable
    share: str = ""


def _repeated(item: pytest.Item) -> Repeated:
    job = job_of(item)
    params = dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if item.get_closest_marker("each_framework") or not (params.get("framework") or (job and job.framework)):
        return Repeated(item.nodeid)
    framework = params.pop("framework", "")
    function = item.location[0], item.originalname
    others = repr([(name, value) for name, value in sorted(params.items()) if name != "job"])
    if framework:  # in processes of their own, which tests of a file share
        return Repeated((function, others), item.location[0])
    return Repeated((function, others, replace(job, framework="", hidden=())), repr((function, others)))


#: The parts by name.
PARTS: Mapping[str, Callable[[Iterable[pytest.Item]], list[pytest.Item]]] = {
    "pure": pure,
    "quick": quick,
    "once": once,
    "rest": rest,
}
