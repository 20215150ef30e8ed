"""``choros bench allreduce``: the contenders, and what is made of their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from choros.bench.cases import AllreduceCase, GroupedCase, unet_shapes
from choros.bench.contender import CHOROS, Contender
from choros.bench.figures import ratios
from choros.bench.plot import fits
from choros.bench.report import Row, Table, compare
from choros.bench.run import Outcome
from choros.bench.sizes import format_bytes
from choros.bench.start import chorosrun, horovodrun, mpirun, torchrun

__all__ = ["ANY_ARRAY", "CONTENDERS", "DTYPES", "MEMCPY", "cases", "rows", "tables"]

ANY_ARRAY, MEMCPY = "choros, any array", "memcpy"
DTYPES = ("float32", "float64", "float16", "int32", "int64")

CONTENDERS = (
    Contender(CHOROS, chorosrun, "allreduce_choros", ["in-place"]),
    Contender(ANY_ARRAY, chorosrun, "allreduce_choros", ["any-array"]),
    Contender("mpi4py", mpirun, "allreduce_mpi4py", needs=["mpi4py"]),
    Contender("mpi4py prepared", chorosrun, "allreduce_mpi4py", needs=["mpi4py"]),
    Contender("mpi4py in 4 MiB pieces", chorosrun, "allreduce_mpi4py", [str(4 << 20)], needs=["mpi4py"]),
    Contender("torch Gloo", torchrun, "allreduce_torch", needs=["torch"]),
    Contender("Horovod", horovodrun, "allreduce_horovod", needs=["horovod", "torch"]),
    Contender(MEMCPY, chorosrun, "memcpy"),
)

#: Filters of each level: the example's, and those of the U-Net of Ronneberger et al. (2015) at half its width,
#: which Keras code that is trained on ``imgs_train.npy`` commonly has.
_UNETS = {"U-Net": (16, 32, 64), "U-Net of 5 levels": (32, 64, 128, 256, 512)}

_BYTES_COUNT_FROM = 1 << 20

_NOTES = (
    "÷: the contender's time divided by choros'; above 1, choros takes less. CPU: of all ranks, for one allreduce.",
    "choros: in place, in memory from Communicator.empty, control message included; any array: a new array out.",
    "mpi4py: by plain mpirun; prepared and in pieces: by chorosrun, with its memory settings and binding to cores.",
    "grouped: choros by grouped_allreduce of the gradients; all others by one allreduce of an array of as many bytes.",
)


def cases(sizes: Sequence[int], dtype: str) -> list[AllreduceCase | GroupedCase]:
    """The sizes one by one, then the gradients of U-Nets."""
    grouped = [GroupedCase(name, unet_shapes(widths), dtype) for name, widths in _UNETS.items()]
    return [*(AllreduceCase(size, dtype) for size in sizes), *grouped]


def rows(outcome: Outcome[AllreduceCase | GroupedCase], ranks: int) -> list[Row]:
    """What was measured on so many ranks."""
    return [
        Row("grouped" if isinstance(case, GroupedCase) else "allreduce", name, ranks, summary, case.facts)
        for (case, name), summary in outcome.summaries.items()
    ]


def tables(measured: Sequence[Row]) -> list[Table]:
    """The tables of ``measured``, two for each number of ranks, with what they come to."""
    made = []
    numbers = sorted({row.ranks for row in measured})
    for ranks in numbers:
        here = [row for row in measured if row.ranks == ranks]
        title = f"allreduce of {here[0].facts['dtype']}, {ranks} rank{'s' if ranks > 1 else ''}"
        single = _sections([row for row in here if row.bench == "allreduce"], _size)
        grouped = _sections([row for row in here if row.bench == "grouped"], _model)
        fractions = [line for label, section in single for line in _fraction(label, section)]
        costs = [line for label, section in grouped for line in _grouped_cost(label, section)]
        models = [
            f"α-β model of choros: α = {model.alpha_s * 1e6:.3g} µs a message, β = {model.beta_s * 1e9:.3g} ns a byte"
            for model in fits([row for row in here if row.bench == "allreduce"])
        ]
        made.append(compare(title, single, notes=[*fractions, *models]))
        made.append(compare(f"grouped {title}", grouped, notes=[*costs, *(_NOTES if ranks == numbers[-1] else ())]))
    return made


def _sections(measured: Sequence[Row], label: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    sections: dict[str, list[Row]] = {}
    for row in measured:
        sections.setdefault(label(row), []).append(row)
    return list(sections.items())


def _size(row: Row) -> str:
    return format_bytes(row.facts["bytes"])


def _model(row: Row) -> str:
    return f"{row.facts['model']}: {row.facts['arrays']} gradients, {_size(row)}"


def _fraction(label: str, section: Sequence[Row]) -> list[str]:
    """How near choros comes to a memcpy, where bytes are what takes time."""
    found = {row.peer: row.summary for row in section}
    if CHOROS not in found or MEMCPY not in found or section[0].facts["bytes"] < _BYTES_COUNT_FROM:
        return []
    share = ratios(found[MEMCPY], found[CHOROS])
    return [f"{label}: {share.best:.0%} of a memcpy's speed (median {share.median:.0%})"]


def _grouped_cost(label: str, section: Sequence[Row]) -> list[str]:
    """What many arrays cost more than one."""
    found = {row.peer: row.summary for row in section}
    if CHOROS not in found or ANY_ARRAY not in found:
        return []
    cost = ratios(found[CHOROS], found[ANY_ARRAY])
    return [f"{label}: {cost.best:.2f} times one allreduce of the same bytes (median {cost.median:.2f})"]
