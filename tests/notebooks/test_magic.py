"""``%%choros`` and ``choros.run`` in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebooks.kernel import Kernel, started_kernel

pytestmark = pytest.mark.slow

RANK = "import choros; choros.init(); rank = choros.rank()"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with started_kernel() as kernel:
        assert kernel.run("%load_ext choros", "import threading", "lock = threading.Lock()").error == ""
        yield kernel


def test_output_arrives_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "seen"
    ran = kernel.run(
        "%%choros -np 2",
        RANK,
        "import pathlib, time",
        "print('rank', rank, 'of', choros.size())",
        f"while not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)",
        "print('end')",
        then=("of 2", 2, file.touch),
    )
    assert sorted(ran.out.split("\n")[:-1]) == ["[0] end", "[0] rank 0 of 2", "[1] end", "[1] rank 1 of 2"]
    assert re.fullmatch(r"choros: ended after \d+ s", ran.shown[-1])
    assert ran.error == ""


def test_variables_come_and_go(kernel: Kernel) -> None:
    kernel.run("class Doubled:", "    def __init__(self, of): self.value = 2 * of", "base = 20")
    ran = kernel.run(
        "%%choros -np 2 --give base,Doubled --result mine,name", RANK, "mine, name = Doubled(base + rank), __name__"
    )
    assert ran.error == ""
    assert kernel.run("print(mine.value, isinstance(mine, Doubled), name)").out == "40 True __main__\n"


def test_a_rank_that_fails(kernel: Kernel) -> None:
    ran = kernel.run("%%choros -np 2", RANK, "if rank == 1:", "    {}['absent']", "import time; time.sleep(600)")
    assert ran.error == "WorkerFailed"
    assert re.search(
        r"^choros\.errors\.WorkerFailed: rank 1 on \S+ failed with exit code 1 \(KeyError\); the other rank was",
        ran.traceback,
        re.M,
    )
    assert ran.traceback.endswith(
        "File \"<cell>\", line 4, in <module>\n    {}['absent']\n    ~~^^^^^^^^^^\nKeyError: 'absent'"
    )
    assert (
        kernel.run("import choros", "try:", "    1 / 0", "except ZeroDivisionError:", "    print('goes on')").out
        == "goes on\n"
    )


def test_the_kernel_is_interrupted(kernel: Kernel) -> None:
    ran = kernel.run(
        "%%choros -np 2", RANK, "import os, time", "print('pid', os.getpid())", "time.sleep(600)",
        then=("pid", 2, kernel.manager.interrupt_kernel),
    )  # fmt: skip
    assert ran.error == "KeyboardInterrupt"
    processes = [int(number) for number in re.findall(r"pid (\d+)", ran.out)]
    assert len(processes) == 2
    assert not any(map(psutil.pid_exists, processes))
    assert kernel.run("%%choros -np 2", RANK, "print('again', rank)").out.count("again") == 2


def test_functions_of_cells(kernel: Kernel) -> None:
    define = ["import choros", "class Inverse:", "    def of(self, number):", "        return 1 / number"]
    kernel.run(*define, "def call(number):", "    " + RANK, "    return Inverse().of(number + rank)")
    ran = kernel.run("print(choros.run(call, (1,), num_proc=2))")
    assert ran.out == "[1.0, 0.5]\n"
    assert ran.shown[-1].startswith("choros: ended after")
    ran = kernel.run("choros.run(call, (-1,), num_proc=2)")
    assert ran.error == "WorkerFailed"
    assert ran.traceback.endswith("return 1 / number\n           ~~^~~~~~~~\nZeroDivisionError: division by zero")


def test_ranks_have_the_source_of_cells(kernel: Kernel) -> None:
    """AutoGraph needs it."""
    kernel.run(
        "def source():",
        "    import inspect",
        "    def inner(): return 42",
        "    return inspect.getsource(inner).strip()",
    )
    assert kernel.run("print(choros.run(source))").out == "['def inner(): return 42']\n"


@pytest.mark.parametrize(
    ("line", "cell", "error", "text"),
    [
        ("-np two", "1", "ConfigError", "'two' is not a valid whole number. %choros --help"),
        ("-np 0", "1", "ConfigError", "-np 0: expected a whole number from 1"),
        ("-np 2 --nonsense", "1", "ConfigError", "No such option '--nonsense'"),
        ("--give absent", "1", "ConfigError", "--give absent: the notebook has no variable absent: set it first."),
        ("--give a.b", "1", "ConfigError", "'a.b' is no name"),
        ("-np 1 --env 'A", "1", "ConfigError", "%%choros -np 1 --env 'A: No closing quotation. %choros --help"),
        ("--give lock", "1", "ConfigError", "cannot be sent: cannot pickle '_thread.lock' object."),
        ("-np 1 --result a", "import threading; a = threading.Lock()", "WorkerFailed", "cannot be sent back: cannot"),
        ("--ps 1 -np 1", "1", "ConfigError", "!chorosrun --ps 1"),
        ("-np 1 --result absent", "1", "WorkerFailed", "on rank 0 the cell has not set absent: set it."),
        ("-np 2", "1 +", "SyntaxError", "invalid syntax"),
    ],
)
def test_what_cannot_be(kernel: Kernel, line: str, cell: str, error: str, text: str) -> None:
    ran = kernel.run(f"%%choros {line}", cell)
    assert ran.error == error
    assert text in ran.traceback


def test_help(kernel: Kernel) -> None:
    text = kernel.run("%choros --help").out
    assert text.startswith("Usage: %%choros [OPTIONS]")
    assert "--give NAME,..." in text
    assert "--dry-run" not in text
