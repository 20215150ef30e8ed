"""Whether the verdict of a job names what holds it back, and whether removing that gains what the verdict says.

    sudo KERAS_BACKEND=torch python benchmarks/verdict/main.py --json result.json

Runs ``training.py`` on two ranks with each of seven bottlenecks, made on purpose, and without it, in turn, as root
also over a link of 100 Mbit/s. Compares the gain that the verdict promises with that of the examples per second.
Exits with 1 if a cause or a rank is not the one that was made, or a gain is more than 25 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "slow_link"))

from link import CannotLinkError, Line, slow_link  # noqa: E402

TOLERANCE = 0.25
#: What chorosrun calls each of them, and on which ranks; "" and none: nothing.
EXPECTED: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "input of rank 1": ("input", (1,)),
    "input of all": ("input", ()),
    "rank 1 computes slowly": ("compute", (1,)),
    "a link of 100 Mbit/s": ("exchange", ()),
    "small batches": ("batch size", ()),
    "a commit on each step": ("commits", (0,)),
    "none": ("", ()),
}
LINK = "a link of 100 Mbit/s"


@dataclass(frozen=True)
class Row:
    """A bottleneck, what the verdict says, and the gain without it, measured."""

    bottleneck: str
    cause: str
    ranks: Sequence[int]
    promised: float
    measured: float

    @property
    def is_right(self) -> bool:
        """Whether cause, ranks and gain are."""
        named = (self.cause, tuple(self.ranks)) == EXPECTED[self.bottleneck]
        return named and (not self.cause or abs(self.promised / self.measured - 1) <= TOLERANCE)


def run(command: Callable[[Sequence[str]], int], *, bottleneck: str, removed: bool) -> dict[str, Any]:
    """The record of a job."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "run.html"
        script = [sys.executable, str(HERE / "training.py"), bottleneck, *(["removed"] if removed else [])]
        commits = ["--min-np", "2", "--commit-dir", directory, *([] if removed else ["--commit-steps", "1"])]
        flags = ["--report", str(report), *(commits if bottleneck == "a commit on each step" else [])]
        code = command([*flags, *script])
        record: dict[str, Any] = json.loads(report.with_suffix(".json").read_text())
    if code or record["verdict"] is None:
        sys.exit(f"{bottleneck}: the job ended with {code}, and its verdict is {record['verdict']}")
    return record


def on_this_machine(arguments: Sequence[str]) -> int:
    """Runs chorosrun on two ranks here."""
    chorosrun = str(Path(sys.executable).with_name("chorosrun"))
    return subprocess.run([chorosrun, "-np", "2", *arguments], check=False, stdout=subprocess.DEVNULL).returncode


def compare(bottleneck: str) -> Row:
    """Runs a job with the bottleneck and one without it."""
    if bottleneck == LINK:
        with slow_link(Line(100e6, 100e-6)) as link:
            record = run(link.run, bottleneck=bottleneck, removed=False)
    else:
        record = run(on_this_machine, bottleneck=bottleneck, removed=False)
    without = run(on_this_machine, bottleneck=bottleneck, removed=True)
    found = record["verdict"]["bottleneck"] or {"cause": "", "ranks": [], "gain": 1.0}
    gain = without["verdict"]["examples_per_second"] / record["verdict"]["examples_per_second"]
    return Row(bottleneck, found["cause"], found["ranks"], found["gain"], gain)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=EXPECTED, action="append", help="only these bottlenecks")
    parser.add_argument("--json", type=Path, help="the file for the results")
    arguments = parser.parse_args()
    rows = []
    for bottleneck in arguments.only or EXPECTED:
        try:
            row = compare(bottleneck)
        except CannotLinkError as error:
            print(f"{bottleneck}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        where = f" on {', '.join(map(str, row.ranks))}" if row.ranks else ""
        said = f"{row.cause or 'nothing'}{where}, {row.promised:.2f} promised, {row.measured:.2f} measured"
        print(f"{'right' if row.is_right else 'WRONG'}  {bottleneck}: {said}", flush=True)
    if arguments.json:
        result = {"framework": os.environ.get("KERAS_BACKEND", ""), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
