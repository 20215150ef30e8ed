"""The arguments that Horovod's faces have in common: what they mean, and an older form."""

import inspect
import re
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from choros.comm import Reduction
from choros.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

#: What the arguments mean that several public functions have.
ARGUMENTS = {
    "tensor": "a tensor of the same dtype on every rank, or a number.",
    "tensors": "several of them, in the same order on every rank.",
    "value": "an array, tensor or variable of any framework, eager or in a compiled function, or a number.",
    "average": "Horovod's older form of ``op``; deprecated.",
    "name": "shown in errors; the same on every rank.",
    "compression": "the dtype in which values are sent: ``none`` or ``fp16``.",
    "op": "the reduction: ``Average``, which is the default, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.",
    "prescale_factor": "the factor of values before the reduction; products with integers are rounded towards zero.",
    "postscale_factor": "their factor after it.",
    "process_set": "the participating ranks.",
    "root_rank": "the global rank whose values all ranks receive, also within a process set.",
    "splits": "the number of rows for each rank; ``None`` splits them equally.",
    "device_dense": "Horovod's; ignored, because the engine selects the device.",
    "device_sparse": "Horovod's; likewise.",
    "ignore_name_scope": "Horovod's; ignored, because names are those that are given.",
}
#: The same of distributed optimizers and tapes.
REDUCTION_ARGUMENTS = {
    "compression": "how gradients are compressed, such as ``Compression.fp16``; see docs/compression.md.",
    "sparse_as_dense": "whether sparse gradients, those of embeddings on TensorFlow, are made dense before ranks "
    "reduce them. By default ranks gather the rows that their batches used.",
    "gradient_predivide_factor": "the divisor before the sum; the average divides by the rest after it.",
    "op": "``Average`` or ``Sum``.",
    "backward_passes_per_step": "the number of micro-batches whose gradients are accumulated before ranks reduce them "
    "and the weights are updated.",
    "average_aggregated_gradients": "whether the gradients of those micro-batches are averaged, not summed, which is "
    "Horovod's default.",
    "num_groups": "Horovod's older form of ``groups``.",
    "groups": "gradients that are reduced together: a number of groups, or lists of variables.",
    "process_set": "the ranks that train together; other ranks train alone.",
    "scale_local_gradients": "whether gradients that stay on their rank are divided by the number of ranks, so that "
    "they have the scale of averaged gradients.",
    "shard_state": "whether each rank has a slice of the optimizer's state only, and updates the weights in it: see "
    "docs/shard-state.md. ``None``: as ``chorosrun --shard-state`` says.",
    "local_layers": "the Keras layers whose gradients stay on their rank, or one layer; they are built.",
}


def op_of(average: bool | None, op: Reduction | None, *, stacklevel: int = 3) -> Reduction:
    """Returns the reduction that Horovod's deprecated ``average`` or its ``op`` selects: the average, if neither.

    >>> op_of(None, Reduction.SUM)
    <Reduction.SUM: 1>
    """
    if average is None:
        return Reduction.AVERAGE if op is None else Reduction(op)
    if op is not None:
        raise ConfigError("allreduce: pass op or average, not both; average is deprecated.")
    text = "allreduce(average=…) is deprecated: use op=Average or op=Sum."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return Reduction.AVERAGE if average else Reduction.SUM


def documented(**specific: str) -> Callable[[F], F]:
    """Returns a decorator that adds the section *Args* to a docstring: what ``ARGUMENTS`` says, or ``specific``.

    >>> @documented(rows="how many.")
    ... def gather(rows, name=None):
    ...     '''Gathers.'''
    >>> print(gather.__doc__)
    Gathers.
    <BLANKLINE>
    Args:
        rows: how many.
        name: shown in errors; the same on every rank.
    <BLANKLINE>
    """

    def document(function: F) -> F:
        texts = {**ARGUMENTS, **specific}
        names = list(inspect.signature(function).parameters)
        unknown = [name for name in names if name not in texts]
        if unknown:
            raise LookupError(f"{function.__name__}: no documentation of {', '.join(unknown)}.")
        lines = [
            textwrap.fill(f"{name}: {texts[name]}", 110, initial_indent="    ", subsequent_indent="        ")
            for name in names
        ]
        doc = inspect.cleandoc(function.__doc__ or "")
        found = re.search(r"^(Returns|Raises|Example):$", doc, re.MULTILINE)
        at = found.start() if found else len(doc)
        parts = [doc[:at].rstrip(), "Args:\n" + "\n".join(lines), doc[at:]]
        function.__doc__ = "\n\n".join(parts).rstrip() + "\n"
        return function

    return document
