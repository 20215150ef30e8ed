"""The ``choros bench`` command: parses arguments and prints; the other modules of this package do the work."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from choros import durations
from choros.bench import allreduce as sums
from choros.bench import memory as needs
from choros.bench import startup
from choros.bench import train as training
from choros.bench.cases import BATCHES, parse_ranks, parse_sizes
from choros.bench.contender import CHOROS, check_names
from choros.bench.report import FILE, check_writable, compare, plot_rows, plot_sizes, show, write_json
from choros.bench.run import ENOUGH_ROUNDS, BenchSession, Effort, machine, machine_text, progress
from choros.wording import count_text

_SIZES = "4KiB,256KiB,4MiB,16MiB,64MiB"
_SIZES_HELP = "Sizes of the array. 1MiB..256MiB: all sizes between these two, in steps of a factor of four."
_MODEL_HELP = "cnn: the model of the MNIST example; mlp: 20 million parameters, SGD; mlp-adam: the same, Adam."
_EPILOG = """\
\b
Every installed contender is measured in the same invocation, in interleaved rounds, started as its users start it.
The tables show the best and the median round, the CPU time, and the ratios of all three: peer / choros.
\b
Exit codes:
  0         choros was measured; peers that were skipped are named with the reason
  1         choros itself could not be measured
  2         invalid arguments
  130, 143  ended by Ctrl-C, by SIGTERM; all started processes are ended, too
"""
_MEMORY_EPILOG = """\
\b
A rank's memory is what is resident at most (VmHWM), with memory that it shares with the others. The bound for the
ratio on 2 ranks with Adam is 0.80, of the memory of training: without what the process needs in any case.
\b
Exit codes:
  0         everything was measured
  1         a job failed
  2         invalid arguments
  130, 143  ended by Ctrl-C, by SIGTERM; all started processes are ended, too
"""
_JSON = click.option("--json", "json_file", type=FILE, metavar="FILE",
                     help="Also write all figures, with a description of the machine, to this file.")  # fmt: skip


def _with_common(seconds: float | None) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Adds the options of all commands, as a session; ``seconds``: the default of ``--burst``, ``None``: without it."""
    options = (
        click.option("--rounds", type=click.IntRange(min=1), default=ENOUGH_ROUNDS, show_default=True,
                     help="Number of trials of each contender."),
        click.option("--burst", type=click.FloatRange(min=0, min_open=True), default=seconds, show_default=True,
                     metavar="SECONDS", help="Approximate duration of a trial."),
        click.option("--only", multiple=True, metavar="NAME",
                     help="Measure only choros and this contender, named as in the tables; may be given more than "
                     "once."),
        click.option("--plot", type=FILE, metavar="FILE.png",
                     help="Also plot the figures to this file."),
        _JSON,
    )  # fmt: skip

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def command(**given: Any) -> int:
            names = ("rounds", "burst", "only", "plot", "json_file")
            return function(session=BenchSession(**{each: given.pop(each, 0.0) for each in names}), **given)

        for option in reversed(options if seconds is not None else [*options[:1], *options[2:]]):
            command = option(command)
        return command

    return decorate


@click.group(epilog=_EPILOG, invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measures choros and its peers in the same run, and compares them by their ratios."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@bench.command(epilog=_EPILOG)
@click.option("--sizes", default=_SIZES, show_default=True, metavar="SIZE,...", help=_SIZES_HELP)
@click.option(
    "--dtype", type=click.Choice(sums.DTYPES), default="float32", show_default=True, help="Data type of the array."
)
@click.option(
    "-np",
    "--ranks",
    default="2",
    show_default=True,
    metavar="N,...",
    help="Number of ranks; 1,2,4,8: one after the other.",
)
@_with_common(durations.BENCH_CALLS)
def allreduce(sizes: str, dtype: str, ranks: str, session: BenchSession) -> int:
    """Measures an allreduce: choros, raw mpi4py, torch Gloo, Horovod, and a memcpy as the limit.

    \b
    Examples:
      choros bench allreduce
      choros bench allreduce --sizes 4KiB,64MiB --dtype float16 --json sums.json
      choros bench allreduce --ranks 1,2,4,8 --sizes 1MiB..256MiB --only memcpy --plot scaling.png
    """
    effort = Effort(session.rounds, session.burst, many_runs=True)
    wanted, numbers = parse_sizes(sizes), parse_ranks("--ranks", ranks)
    check_names(session.only, [each.name for each in sums.CONTENDERS])
    with session:
        for number in numbers:
            session.run(sums.CONTENDERS, sums.cases(wanted, dtype), number, effort, partial(sums.row, number))
    singles = [row for row in session.rows if row["bench"] == "allreduce"]
    return session.report(sums.tables(session.rows), lambda path: plot_sizes(singles, path, session.machine["cores"]))


_FRAMEWORK = click.option("--framework", type=click.Choice([*training.CONTENDERS, "all"]), default="all",
                          show_default=True, help="The framework to train with; all: every installed one.")  # fmt: skip
_MODEL = click.option("--model", type=click.Choice([*BATCHES, "all"]), default="all", show_default=True,
                      help=_MODEL_HELP)  # fmt: skip
_RANKS = click.option("-np", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, metavar="N",
                      help="Number of ranks.")  # fmt: skip
_BATCH = click.option("--batch-size", type=click.IntRange(min=1), metavar="N",
                      help="Batch size of each rank. Default: 128 (cnn), 32 (others).")  # fmt: skip


@bench.command(epilog=_EPILOG)
@_FRAMEWORK
@_MODEL
@_BATCH
@_RANKS
@_with_common(durations.BENCH_STEPS)
def train(framework: str, model: str, batch_size: int | None, ranks: int, session: BenchSession) -> int:
    """Measures training steps: choros, torch DDP, MirroredStrategy, MultiWorkerMirroredStrategy, jax.jit on a mesh,
    keras.distribution, Horovod.

    \b
    Examples:
      choros bench train
      choros bench train --framework torch --model mlp --json steps.json
    """
    effort = Effort(session.rounds, session.burst, many_runs=False)
    wanted = training.frameworks(framework)
    contenders = {name: training.CONTENDERS[name] for name in wanted}
    check_names(session.only, [each.name for group in contenders.values() for each in group])
    cases = training.cases(model, batch_size)
    with session:
        for name, group in contenders.items():
            row = partial(training.row, "train", name, ranks)
            session.run(group, cases, ranks, effort, row, f"{name}: ")
    title, sections = f"training step, {count_text(ranks, 'rank')}", training.sections(session.rows)
    table = compare(title, sections, throughput=True, notes=training.NOTES)
    return session.report([table], lambda path: plot_rows(sections, path, title))


@bench.command(epilog=_EPILOG)
@_FRAMEWORK
@click.option("--model", type=click.Choice(list(BATCHES)), default="cnn", show_default=True, help=_MODEL_HELP)
@_BATCH
@click.option(
    "--starts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How often all contenders are started, for as many rounds each time: two starts of one job differ.",
)
@_with_common(durations.BENCH_STEPS)
def overhead(framework: str, model: str, batch_size: int | None, starts: int, session: BenchSession) -> int:
    """Measures choros' overhead for one rank, the speedup with two ranks, and the parts of a step's communication.

    One rank has one core. Two ranks are compared with two independent processes of plain Keras, one on each core,
    which is the limit of the machine; with an elastic job (--min-np 1); and with the same job, started again, which
    shows how much two jobs that are the same differ by. All are started by chorosrun, in the same environment.

    \b
    Examples:
      choros bench overhead
      choros bench overhead --framework tensorflow --batch-size 2048 --rounds 30
      choros bench overhead --only "choros, elastic" --only "choros, again" --rounds 8 --starts 8
    """
    effort = Effort(session.rounds, session.burst, many_runs=False, starts=starts)
    check_names(session.only, [each.name for each in training.OVERHEAD])
    wanted, cases = training.frameworks(framework), training.cases(model, batch_size)
    with session:
        for name in wanted:
            contenders = training.of(name, *training.OVERHEAD)
            session.run(contenders, cases, 2, effort, partial(training.row, "overhead", name, 2), f"{name}: ")
        brief = Effort(session.rounds, durations.BENCH_CALLS, many_runs=True)
        session.run(training.OVERHEAD_OF_PARTS, training.PARTS, 2, brief, training.part_row)
    title, sections = "training step, 1 and 2 ranks", training.sections(session.rows)
    return session.report(training.overhead_tables(title, session.rows), lambda path: plot_rows(sections, path, title))


@bench.command(epilog=_EPILOG)
@_RANKS
@_with_common(None)
def start(ranks: int, session: BenchSession) -> int:
    """Measures the start of programs that do almost nothing: chorosrun, mpirun, torchrun; a first allreduce; an
    import.

    \b
    Examples:
      choros bench start
      choros bench start --ranks 4 --only mpirun --rounds 20 --json start.json
    """
    names = [program.name for programs in startup.CASES.values() for program in programs]
    check_names(session.only, names)
    wanted = (CHOROS, *session.only) if session.only else names
    with session:
        result = startup.run_starts(startup.CASES, wanted, ranks, session.rounds, session.show_progress)
        session.note(result, partial(startup.row, ranks))
    title, sections = f"start to end, {count_text(ranks, 'rank')}", startup.sections(session.rows)
    return session.report(
        [compare(title, sections, notes=startup.NOTES)], lambda path: plot_rows(sections, path, title)
    )


@bench.command(epilog=_MEMORY_EPILOG)
@_FRAMEWORK
@click.option(
    "--parameters",
    type=click.IntRange(min=needs.LAYERS),
    default=100_000_000,
    show_default=True,
    metavar="N",
    help=f"Parameters of the model, in {needs.LAYERS} equal layers.",
)
@_RANKS
@_JSON
def memory(framework: str, parameters: int, ranks: int, json_file: Path | None) -> int:
    """Measures the memory of a rank that trains with Adam, without and with DistributedOptimizer's shard_state.

    \b
    Examples:
      choros bench memory
      choros bench memory --framework torch --parameters 20000000 --json memory.json
    """
    check_writable("--json", json_file)
    wanted = training.frameworks(framework)
    with progress() as show_progress:
        rows, failed = needs.measure_all(wanted, ranks, parameters, show_progress)
    if rows:
        show(needs.table(rows))
        click.echo()
    for each in failed:
        click.echo(f"failed: {each}")
    described = machine()
    click.echo(f"machine: {machine_text(described)}")
    write_json(json_file, {"machine": described, "rows": rows})
    return 1 if failed else 0
