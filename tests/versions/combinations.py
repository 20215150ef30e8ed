"""The environments in which choros is tried: each Python, with the oldest and the newest release of each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["AGES", "PARTS", "Combination", "Step", "chosen", "combinations", "oldest_pins", "steps"]

AGES = ("oldest", "newest")
#: What is run in an environment.
PARTS = ("quickstart", "suite")


@dataclass(frozen=True)
class Combination:
    """An environment.

    Attributes:
        python: a version with two numbers, such as ``"3.13"``.
        framework: as Keras names it.
        age: the oldest release of the framework that the extra admits on this Python, or the newest.
        extra: that of choros with the framework.
        pins: requirements beside the extra's.
    """

    python: str
    framework: str
    age: str
    extra: str
    pins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.python} {self.framework} {self.age}"


@dataclass(frozen=True)
class Step:
    """A command in an environment.

    Attributes:
        name: says what it does.
        argv: the command, of the environment.
        folder: where it runs.
        environ: further environment variables.
        seconds: its limit.
    """

    name: str
    argv: tuple[str, ...]
    folder: Path
    environ: Mapping[str, str]
    seconds: int


def oldest_pins(requirements: Sequence[str], releases: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns requirements of the oldest release of each package, among those that there are for a Python.

    Args:
        requirements: those of an extra.
        releases: the releases of each package.
    """
    parsed = [Requirement(each) for each in requirements]
    return tuple(f"{each.name}=={min(each.specifier.filter(releases[each.name]), key=Version)}" for each in parsed)


def combinations(
    extras: Mapping[str, Sequence[str]],
    frameworks: Mapping[str, str],
    releases: Mapping[str, Mapping[str, Sequence[str]]],
) -> tuple[Combination, ...]:
    """Returns the combinations of the Pythons, the frameworks and the ages.

    Args:
        extras: the requirements of each extra.
        frameworks: the extra of each framework.
        releases: for each Python the releases of each package that can be installed on it.
    """
    return tuple(
        Combination(python, framework, age, extra, oldest_pins(extras[extra], packages) if age == "oldest" else ())
        for python, packages in releases.items()
        for framework, extra in frameworks.items()
        for age in AGES
    )


def chosen(everything: Sequence[Combination], words: Sequence[str]) -> tuple[list[Combination], list[str]]:
    """Returns the combinations and the parts that ``words`` name: all of a kind of which they name none.

    Args:
        everything: the combinations that there are.
        words: Pythons, frameworks, ages and parts.

    Raises:
        ValueError: a word names nothing.
    """
    kinds = [*map(set, zip(*(str(each).split() for each in everything), strict=True)), set(PARTS)]
    known = set().union(*kinds)
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"{' '.join(unknown)}: there is {' '.join(sorted(known))}")
    *kept, parts = [kind & set(words) or kind for kind in kinds]
    found = [each for each in everything if all(map(set.__contains__, kept, str(each).split()))]
    return found, [part for part in PARTS if part in parts]


def steps(
    combination: Combination, parts: Sequence[str], wheel: Path, interpreter: Path, home: Path, checkout: Path
) -> list[Step]:
    """Returns the steps of a combination.

    Args:
        combination: the environment.
        parts: what is run in it.
        wheel: choros.
        interpreter: the Python of the combination.
        home: an empty folder outside of the checkout, for the environment and what its programs write.
        checkout: where the tests are.
    """
    python = str(home / "env" / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    tools = "test,jax-test" if combination.framework == "jax" else "test"

    def step(name: str, *argv: str, folder: Path = home, seconds: int = 300, **environ: str) -> Step:
        return Step(name, argv, folder, environ, seconds)

    found = [
        step("environment", str(interpreter), "-m", "venv", str(home / "env")),
        step("install", *pip, "install", f"{wheel}[{combination.extra}]", *combination.pins, seconds=1800),
        step("pip check", *pip, "check"),
        step("chorosrun --help", "chorosrun", "--help"),
        step("choros bench --help", "choros", "bench", "--help"),
        step("chorosrun --check-build", "chorosrun", "--check-build"),
    ]
    if "quickstart" in parts:
        found.append(step("quickstart", "sh", "-e", "quickstart.sh"))
    if "suite" in parts:
        where = f"import choros; assert choros.__file__.startswith({str(home)!r}), choros.__file__"
        suite = ("-m", "pytest", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--part", "quick")
        found += [
            step(
                "install tools",
                *pip,
                "install",
                f"{wheel}[{combination.extra},{tools}]",
                *combination.pins,
                seconds=1800,
            ),
            step("the wheel is tested", python, "-c", where, folder=checkout),
            step(
                "suite",
                *(python, *suite, "-q", "-p", "no:cacheprovider"),
                folder=checkout,
                seconds=3600,
                CHOROS_TEST_FRAMEWORKS=combination.framework,
            ),
        ]
    return found
