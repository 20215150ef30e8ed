"""The ``choros forecast`` command: parses arguments and prints; the other modules of this package do the work."""

from pathlib import Path

import click

from choros.bench.cases import parse_ranks
from choros.bench.plot import check_files
from choros.bench.report import show, write_json
from choros.errors import ConfigError
from choros.forecast.costs import Machines
from choros.forecast.links import PROFILES, link_of
from choros.forecast.model import Failures, memory_of, predict, settings
from choros.forecast.report import Outlook, plot
from choros.forecast.workload import workload_of
from choros.trace.cli import trace_of

_HELP = f"""\
Predicts the step of a recorded job on ranks that are not rented yet: its time, efficiency and cost.

\b
Examples:
  chorosrun -np 2 --timeline-filename run.json python train.py
  choros forecast run.json --np 8,64,512 --net 10Gbit,20us --per-host 8
  choros forecast run.json --np 8,64 --net ethernet-25 --price 2.50 --mtbf 2000 --plot forecast.png

\b
Links, of --net and --intra:
  BANDWIDTH,LATENCY   of a program: what iperf3 measures, and half of what ping does
  {", ".join(PROFILES)}
  FILE.json           of choros bench allreduce --json: α and β are fitted
"""
_LINK = "BANDWIDTH,LATENCY|PROFILE|FILE.json"
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(help=_HELP)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("-np", "--np", "ranks", required=True, metavar="N,...", help="Numbers of ranks.")
@click.option("--net", required=True, metavar=_LINK, help="The link between two hosts.")
@click.option("--intra", metavar=_LINK, help="That between ranks of a host. Default: its memory, as recorded.")
@click.option(
    "--per-host", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Ranks of a host."
)
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Steps of an epoch as recorded. Default: the timeline's."
)
@click.option(
    "--price", type=click.FloatRange(min=0), metavar="PRICE", help="Of an hour of a rank: adds the cost of an epoch."
)
@click.option(
    "--every", type=click.IntRange(min=1), default=16, show_default=True, metavar="H", help="Steps of DiLoCo."
)
@click.option("--power", type=click.IntRange(min=1), default=4, show_default=True, metavar="RANK", help="Of power_sgd.")
@click.option("--mtbf", type=_SECONDS, metavar="HOURS", help="A rank's mean time between failures: adds their cost.")
@click.option(
    "--checkpoint", type=_SECONDS, default=30, show_default=True, metavar="SECONDS", help="To save a checkpoint."
)
@click.option(
    "--restart", type=_SECONDS, default=120, show_default=True, metavar="SECONDS", help="To start a job again."
)
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all of it."
)
def forecast(
    file: Path, ranks: str, net: str, intra: str | None, per_host: int, steps: int | None, price: float | None,
    every: int, power: int, mtbf: float | None, checkpoint: float, restart: float,
    plot_file: Path | None, json_file: Path | None,
) -> int:  # fmt: skip
    """See ``_HELP``."""
    check_files(plot_file, json_file)
    numbers, between = sorted(parse_ranks("--np", ranks)), link_of("--net", net)
    workload = workload_of(trace_of(file))
    within = memory_of(workload) if intra is None else link_of("--intra", intra)
    machines = Machines(between, within, per_host)
    ways = settings(every, power)
    forecasts = [predict(workload, each, way, machines) for each in numbers for way in (ways if each > 1 else ways[:1])]
    failures = None if mtbf is None else Failures(mtbf * 3600, checkpoint, restart)
    outlook = Outlook(workload, machines, tuple(forecasts), steps or workload.steps_per_epoch or 0, price, failures)
    if price is not None and not outlook.steps:
        raise ConfigError("--price: the timeline has no epoch. Give the steps of one: --steps N.")
    show(outlook.table())
    write_json(json_file, outlook.as_json())
    if plot_file is not None:
        plot(outlook, plot_file)
    return 0
