from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from examples.example_jobs import Job
from harness import ROOT


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests: the first job writes the digits."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(cache: Path) -> Iterator[Callable[..., Job]]:
    """``Job.start``; jobs that still run after the test are killed."""
    jobs: list[Job] = []

    def start(*arguments: object, **options: object) -> Job:
        jobs.append(Job.start(*arguments, cache=cache, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture(scope="session")
def open_example() -> Callable[[str], ModuleType]:
    """Imports an example as a module without running it."""

    @functools.cache
    def open_example(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return open_example
