"""``choros bench allreduce``: its contenders, cases, rows and tables."""

from collections.abc import Sequence

from choros.bench.cases import AllreduceCase, unet_shapes
from choros.bench.contender import CHOROS, Contender, chorosrun, horovodrun, mpirun, process, torchrun
from choros.bench.figures import ratios
from choros.bench.report import Row, Table, compare, fits, grouped, model_text
from choros.wording import bytes_text, count_text

ANY_ARRAY, MEMCPY = "choros, any array", "memcpy"
DTYPES = ("float32", "float64", "float16", "int32", "int64")

CONTENDERS = (
    Contender(CHOROS, chorosrun, process("allreduce", "in_place")),
    Contender(ANY_ARRAY, chorosrun, process("allreduce", "any_array")),
    Contender("mpi4py", mpirun, process("allreduce", "mpi4py"), needs=["mpi4py"]),
    Contender("mpi4py prepared", chorosrun, process("allreduce", "mpi4py"), needs=["mpi4py"]),
    Contender("mpi4py in 4 MiB pieces", chorosrun, process("allreduce", "mpi4py", str(4 << 20)), needs=["mpi4py"]),
    Contender("torch Gloo", torchrun, process("allreduce", "gloo"), needs=["torch"]),
    Contender("Horovod", horovodrun, process("allreduce", "horovod"), needs=["horovod", "torch"]),
    Contender(MEMCPY, chorosrun, process("allreduce", "memcpy")),
)

#: Filters of each level: those of the example, and those of the U-Net of Ronneberger et al. (2015) at half its width,
#: as is common in Keras code that trains on ``imgs_train.npy``.
_UNETS = {"U-Net": (16, 32, 64), "U-Net of 5 levels": (32, 64, 128, 256, 512)}

#: Below this size latency dominates, not bandwidth.
_BANDWIDTH_BOUND_BYTES = 1 << 20

_NOTES = (
    "÷: the contender's time divided by choros'; above 1, choros takes less. CPU: of all ranks, for one allreduce.",
    "choros: in place, in memory from Communicator.empty, with the control message; any array: in ordinary memory.",
    "mpi4py: under plain mpirun; prepared, in pieces: under chorosrun, with its memory settings and core binding.",
    "grouped: choros: grouped_allreduce of the gradients into new arrays; any array: of the gradients, in place; all "
    "others: one allreduce of one array of the same size.",
)


def cases(sizes: Sequence[int], dtype: str) -> list[AllreduceCase]:
    """Returns a case for each size, then one for the gradients of each U-Net."""
    models = [AllreduceCase.grouped(name, unet_shapes(widths), dtype) for name, widths in _UNETS.items()]
    return [*(AllreduceCase(size, dtype) for size in sizes), *models]


def row(ranks: int, case: AllreduceCase, name: str, summary: Row) -> Row:
    """Returns the row of a contender."""
    return {"bench": "grouped" if case.shapes else "allreduce", "peer": name, "ranks": ranks, **summary, **case.facts}


def tables(measured: Sequence[Row]) -> list[Table]:
    """Returns two tables for each number of ranks in ``measured``, with derived figures as notes."""
    made: list[Table] = []
    numbers = sorted({row["ranks"] for row in measured})
    for ranks in numbers:
        here = [row for row in measured if row["ranks"] == ranks]
        title = f"allreduce of {here[0]['dtype']}, {count_text(ranks, 'rank')}"
        arrays = [row for row in here if row["bench"] == "allreduce"]
        single = grouped(arrays, _size)
        gradients = grouped([row for row in here if row["bench"] == "grouped"], _model)
        fractions = [line for label, section in single for line in _fraction(label, section)]
        costs = [line for label, section in gradients for line in _grouped_cost(label, section)]
        models = [f"α-β model of choros: {model_text(each, ' a message', ' a byte')}" for each in fits(arrays).values()]
        made.append(compare(title, single, notes=[*fractions, *models]))
        made.append(compare(f"grouped {title}", gradients, notes=[*costs, *(_NOTES if ranks == numbers[-1] else ())]))
    return made


def _size(row: Row) -> str:
    return bytes_text(row["bytes"])


def _model(row: Row) -> str:
    return f"{row['model']}: {row['arrays']} gradients, {_size(row)}"


def _fraction(label: str, section: Sequence[Row]) -> list[str]:
    """Returns choros' speed as a fraction of a memcpy's, if the size is bound by bandwidth."""
    text = label + ": {:.0%} of a memcpy's speed (median {:.0%})"
    return _against(section, MEMCPY, CHOROS, text) if section[0]["bytes"] >= _BANDWIDTH_BOUND_BYTES else []


def _grouped_cost(label: str, section: Sequence[Row]) -> list[str]:
    """Returns the cost of many arrays relative to one array of the same bytes."""
    return _against(
        section, CHOROS, ANY_ARRAY, label + ": {:.2f} times one allreduce of the same bytes (median {:.2f})"
    )


def _against(section: Sequence[Row], one: str, other: str, text: str) -> list[str]:
    """Returns a text with how the best and the median of one contender are to another's, if both were measured."""
    found = {row["peer"]: row for row in section}
    return [text.format(*ratios(found[one], found[other]))] if {one, other} <= found.keys() else []
