"""The ``choros forecast`` command: parses arguments, links among them; prints, writes and draws."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from choros.bench.cases import parse_ranks
from choros.bench.contender import CHOROS
from choros.bench.figures import fit
from choros.bench.report import FILE, Row, Table, check_files, grouped, model_text, new_figure, save, show, write_json
from choros.errors import ConfigError
from choros.forecast.costs import Link, Machines, allreduce_s, control_s
from choros.forecast.model import Failures, Forecast, best, memory_of, predict, settings
from choros.forecast.workload import Workload, workload_of
from choros.trace.cli import trace_of
from choros.wording import bytes_text, count_text, seconds_text

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|ns)", re.IGNORECASE)

#: What programs get of the links that are rented: of Ethernet 94%, as TCP's and its own headers take the rest.
PROFILES = {
    name: Link(name, latency_us * 1e-6, gbits * 1e9 / 8)
    for name, gbits, latency_us in (
        ("ethernet-1", 0.94, 50),
        ("ethernet-10", 9.4, 30),
        ("ethernet-25", 23.5, 20),
        ("ethernet-100", 94, 15),
        ("infiniband", 190, 2),
        ("nvlink", 2400, 3),
    )
}

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
@click.argument("file", type=FILE)
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
@click.option("--plot", "plot_file", type=FILE, metavar="FILE.png", help="Draw it.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write all of it.")
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
    of_epoch = steps or workload.steps_per_epoch or 0
    if price is not None and not of_epoch:
        raise ConfigError("--price: the timeline has no epoch. Give the steps of one: --steps N.")
    rows = [row_of(each, workload, of_epoch, price, failures) for each in forecasts]
    fastest = [best(group) for _, group in grouped(forecasts, lambda each: str(each.ranks))]
    show(table(workload, machines, rows, fastest))
    finite = [{name: None if value == math.inf else value for name, value in row.items()} for row in rows]
    known = {"workload": asdict(workload), "machines": asdict(machines), "forecasts": finite}
    write_json(json_file, {**known, "best": {str(each.ranks): each.setting for each in fastest}})
    if plot_file is not None:
        plot(rows, between.name, plot_file)
    return 0


def parse_link(option: str, text: str) -> Link:
    """Returns the link that ``text`` describes: BANDWIDTH,LATENCY or the name of a profile.

    >>> parse_link("--net", "10Gbit,20us")
    Link(name='10Gbit,20us', latency_s=2e-05, bytes_per_s=1250000000.0)
    >>> parse_link("--net", "infiniband").latency_s
    2e-06
    """
    if text in PROFILES:
        return PROFILES[text]
    bandwidth, _, latency = text.partition(",")
    rate, delay = _BANDWIDTH.fullmatch(bandwidth.strip()), _LATENCY.fullmatch(latency.strip())
    if rate is None or delay is None or float(rate[1]) == 0:
        raise ConfigError(
            f"{option} {text}: expected BANDWIDTH,LATENCY, such as 10Gbit,20us; one of {', '.join(PROFILES)}; or a "
            "file that choros bench allreduce --json has written."
        )
    return Link(text, float(delay[1]) / _IN_A_SECOND[delay[2].lower()], float(rate[1]) * _BITS[rate[2].lower()] / 8)


def link_of(option: str, text: str) -> Link:
    """Returns the link that ``text`` describes, or that fits a file of ``choros bench allreduce --json``."""
    if not text.endswith(".json"):
        return parse_link(option, text)
    try:
        rows = json.loads(Path(text).read_bytes())["rows"]
        chosen = [row for row in rows if (row["bench"], row["peer"]) == ("allreduce", CHOROS) and row["ranks"] > 1]
        most = max((row["ranks"] for row in chosen), default=0)
        points = [(int(row["bytes"]), float(row["median_s"])) for row in chosen if row["ranks"] == most]
        if any(number <= 0 for point in points for number in point):
            raise ValueError("a size or a time is not above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{option} {text}: it is no file of choros bench allreduce --json: {error!r}.") from error
    link = fit_link(text, most, [size for size, _ in points], [seconds for _, seconds in points])
    if link is None:
        raise ConfigError(
            f"{option} {text}: a fit needs allreduces of two sizes or more on two ranks or more, which differ in their "
            "time. Measure them: choros bench allreduce --ranks 2 --sizes 4KiB..64MiB --json FILE."
        )
    return link


def fit_link(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> Link | None:
    """Returns the link that fits allreduces of ``sizes`` bytes by ``ranks`` best, by least squares of relative errors;
    ``None``: they do not say.

    >>> slow = Machines(Link("", 0.001, 1e6), Link("", 0, 1))
    >>> sizes = [1000, 10**6]
    >>> link = fit_link("", 2, sizes, [control_s(2, slow) + allreduce_s(2, size, slow) for size in sizes])
    >>> round(link.latency_s, 4), round(link.bytes_per_s, -3)
    (0.001, 1000000.0)
    """
    latency, byte = (Machines(link, link) for link in (Link("", 1.0, float("inf")), Link("", 0.0, 1.0)))
    terms = [
        (control_s(ranks, latency) + allreduce_s(ranks, size, latency), allreduce_s(ranks, size, byte))
        for size in sizes
    ]
    found = fit(terms, seconds)
    if found is None or found[1] <= 0:
        return None
    return Link(f"{name}: fitted to {ranks} ranks: {model_text(found, '', ' a byte')}", found[0], 1 / found[1])


def row_of(each: Forecast, workload: Workload, steps: int, price: float | None, failures: Failures | None) -> Row:
    """Returns what the JSON file has of a forecast; ``steps``: of an epoch as recorded, 0 if unknown; ``price``: of an
    hour of a rank.
    """
    row: dict[str, Any] = {**asdict(each), "step_s": each.step_s, "efficiency": each.efficiency}
    if steps:
        row["epoch_s"] = each.epoch_s(workload, steps)
        if price is not None:
            row["epoch_cost"] = each.cost(workload, steps, price)
    if failures is not None:
        row["with_restarts"] = failures.restarting(each.ranks)
        row["in_place"] = failures.in_place(each.ranks, each.step_s)
    return row


def table(workload: Workload, machines: Machines, rows: Sequence[Row], fastest: Sequence[Forecast]) -> Table:
    """Returns the table that is printed; ``fastest``: the best forecast of each number of ranks."""
    heads = ["", "step", "compute", "stragglers", "exchange", "efficiency"]
    heads += [head for name, (head, _) in _FURTHER.items() if name in rows[0]]
    count = len(workload.buckets)
    title = (
        f"recorded on {count_text(workload.ranks, 'rank')}: {seconds_text(workload.compute_s)} of computation a step, "
        f"{bytes_text(workload.nbytes)} of gradients" + (f", in {count} buckets" if count > 1 else "")
    )
    notes = [
        f"{where}: {link.name}: {link.bytes_per_s * 8 / 1e9:.3g} Gbit/s, {link.latency_s * 1e6:.3g} µs"
        for where, link in (("between hosts", machines.between), ("within a host", machines.within))
    ]
    notes.append(
        "A rank keeps its batch size: more ranks make fewer steps. power_sgd and DiLoCo change what is learnt."
    )
    if "in_place" in rows[0]:
        notes.append("with restarts, in place: the efficiency with failures, from checkpoints and as choros recovers.")
    parts = [f"{each.setting} on {count_text(each.ranks, 'rank')} ({each.efficiency:.0%})" for each in fastest]
    notes.append(f"Best, with the speed of a rank against one alone: {', '.join(parts)}.")
    groups = grouped(rows, lambda row: count_text(row["ranks"], "rank"))
    return Table(title, heads, [(label, list(map(_cells, group))) for label, group in groups], notes)


#: The columns of a table that are not in all, by the names in a row: the head, and the text.
_FURTHER: Mapping[str, tuple[str, Callable[[Row], str]]] = {
    "epoch_s": ("epoch", lambda row: seconds_text(row["epoch_s"])),
    "epoch_cost": ("cost", lambda row: f"{row['epoch_cost']:.2f}"),
    "with_restarts": ("with restarts", lambda row: f"{row['efficiency'] / row['with_restarts']:.0%}"),
    "in_place": ("in place", lambda row: f"{row['efficiency'] / row['in_place']:.0%}"),
}


def _cells(row: Row) -> list[str]:
    seconds = (seconds_text(row[name]) for name in ("step_s", "compute_s", "straggler_s", "exchange_s"))
    further = (text(row) for name, (_, text) in _FURTHER.items() if name in row)
    return [row["setting"], *seconds, f"{row['efficiency']:.0%}", *further]


def plot(rows: Sequence[Row], network: str, path: Path) -> None:
    """Draws the efficiency of each setting against the number of ranks."""
    figure, axes = new_figure()
    for name, points in grouped(rows, lambda row: str(row["setting"])):
        axes.plot([row["ranks"] for row in points], [row["efficiency"] for row in points], marker="o", label=name)
    axes.set(xlabel="ranks", ylabel="speed of a rank, against one alone", ylim=(0, 1.05))
    axes.set_title(f"forecast: {network} between hosts")
    save(figure, path, {row["ranks"]: str(row["ranks"]) for row in rows})
