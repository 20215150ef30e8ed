"""Forecasts against measurements: steps that sleep, then reduce, on hosts that a switch of some rate and delay joins.

    sudo python benchmarks/forecast/main.py --json result.json --plot result.png

Records timelines of two ranks of one host, whose computation is a sleep, so that cores do not limit it. Then it makes
each network (``network.py``), fits a link to plain allreduces on its first two hosts, forecasts the steps from both,
and measures them there: all settings on the same ranks, in interleaved rounds. Prints each step as forecast and as
measured, the error, and the spread of the rounds; and how often the fastest setting was named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from network import Line, switched
from steps import COMPUTE, EVERY, POWER

from choros.bench.report import new_figure
from choros.forecast.cli import fit_link
from choros.forecast.costs import Machines
from choros.forecast.model import memory_of, predict, settings
from choros.forecast.workload import Workload, workload_of
from choros.trace.files import read_trace

#: Mbit/s, ms, hosts, and ranks of each.
NETWORKS = (
    (100, 0.1, 2, 1), (100, 1, 2, 1), (100, 5, 2, 1), (300, 0.5, 2, 1), (300, 5, 2, 1), (1000, 0.1, 2, 1),
    (1000, 2, 2, 1), (10_000, 0.1, 2, 1), (100, 1, 3, 1), (100, 1, 4, 1), (300, 5, 4, 1), (100, 1, 2, 2),
    (300, 0.5, 2, 4), (100, 1, 8, 1),
)  # fmt: skip
CORES = os.cpu_count() or 1
STEPS = Path(__file__).with_name("steps.py")


@dataclass(frozen=True)
class Row:
    """A setting in a network: seconds of a step as forecast, and as measured in each round."""

    mbits: float
    delay_ms: float
    hosts: int
    ranks: int
    setting: str
    forecast_s: float
    rounds_s: list[float]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def error(self) -> float:
        return self.forecast_s / self.measured_s - 1

    @property
    def spread(self) -> float:
        """Half of the interquartile range of the rounds, as a part of their median."""
        low, _, high = statistics.quantiles(self.rounds_s, n=4)
        return (high - low) / 2 / self.measured_s


def recorded(directory: Path, setting: str) -> Workload:
    """Records two ranks of this host."""
    file = directory / "run.json"
    chorosrun = str(Path(sys.executable).with_name("chorosrun"))
    command = [chorosrun, "-np", "2", "--timeline-filename", str(file), sys.executable, str(STEPS)]
    subprocess.run([*command, "--record", setting], check=True, timeout=120)
    return workload_of(read_trace(file))


def compared(works: dict[str, Workload], network: Sequence[float], rounds: int, directory: Path) -> list[Row]:
    """Forecasts and measures one network."""
    mbits, delay_ms, hosts, slots = network[0], network[1], int(network[2]), int(network[3])
    result = directory / "result.json"
    with switched(hosts, Line(mbits * 1e6, delay_ms / 1e3)) as made:
        pair = replace(made, hosts=made.hosts[:2])
        pair.run(
            1, ["env", "OPENBLAS_NUM_THREADS=1", sys.executable, str(STEPS), "--calibrate", str(result)], seconds=100
        )
        link = fit_link("the first two hosts", 2, *json.loads(result.read_text()))
        assert link is not None
        made.run(
            slots,
            ["env", "OPENBLAS_NUM_THREADS=1", sys.executable, str(STEPS), "--measure", str(rounds), str(result)],
            seconds=580,
        )
    fitted = f"{link.bytes_per_s * 8e-6:.4g} Mbit/s, {link.latency_s * 1e3:.3g} ms"
    print(f"\n{mbits:g} Mbit/s, {delay_ms:g} ms; as fitted: {fitted}", flush=True)
    memory = memory_of(works["plain"])  # recorded with a core for each of two ranks; these hosts share the cores
    memory = replace(memory, bytes_per_s=memory.bytes_per_s / max(1, hosts * slots / CORES))
    machines = Machines(link, memory, slots)
    rows = []
    for way in settings(EVERY, POWER):
        rounds_s = json.loads(result.read_text()).get(way.name)
        if rounds_s is not None:
            step = predict(works.get(way.name, works["plain"]), hosts * slots, way, machines)
            rows.append(Row(mbits, delay_ms, hosts, hosts * slots, way.name, step.step_s, rounds_s))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each setting and network."""
    head = "| Mbit/s | ms | hosts, ranks | setting | forecast | measured | error | ± rounds |"
    lines = [
        f"| {row.mbits:g} | {row.delay_ms:g} | {row.hosts}, {row.ranks} | {row.setting} | {row.forecast_s:.3f} s | "
        f"{row.measured_s:.3f} s | {row.error:+.1%} | {row.spread:.1%} |"
        for row in rows
    ]
    return "\n".join([head, "|" + "---|" * 8, *lines])


def verdict(rows: Sequence[Row]) -> str:
    """The mean and the largest error, and how often the fastest setting was named."""
    errors = [abs(row.error) for row in rows]
    spread = statistics.mean(row.spread for row in rows)
    lines = [f"error: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}; rounds ± {spread:.1%}"]
    for what, left in (
        ("all settings", rows),
        ("those of every step", [row for row in rows if "DiLoCo" not in row.setting]),
    ):
        networks: dict[tuple[float, ...], list[Row]] = {}
        for row in left:
            networks.setdefault((row.mbits, row.delay_ms, row.hosts, row.ranks), []).append(row)
        named = sum(
            min(of, key=lambda r: r.forecast_s).setting == min(of, key=lambda r: r.measured_s).setting
            for of in networks.values()
        )
        lines.append(f"the fastest of {what} was named in {named} of {len(networks)} networks")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws forecasts against measurements."""
    figure, axes = new_figure()
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        axes.plot([row.measured_s for row in chosen], [row.forecast_s for row in chosen], "o", label=setting)
    ends = [COMPUTE, max(row.measured_s for row in rows) * 1.1]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="k", alpha=0.08, label="± 10%"
    )
    axes.set(xscale="log", yscale="log", xlabel="seconds of a step, measured", ylabel="forecast")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", type=int, nargs="*", help="their numbers, from 0 on (default: all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the networks, and a setting of the kernel, are undone
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        works = {setting: recorded(directory, setting) for setting in ("plain", "overlap")}
        for number, network in enumerate(NETWORKS):
            if arguments.networks is None or number in arguments.networks:
                new = compared(works, network, arguments.rounds, directory)
                rows += new
                print(table(new), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{table(rows)}\n\n{verdict(rows)}")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
