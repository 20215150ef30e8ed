"""The preparation of a model for distributed training: the only module that changes a model.

A choros callback calls ``attach`` before Keras builds the training function. It changes the following on *this* model
object; nothing of it is saved with the model:

1. ``train_step`` reports the number of examples in its batch to the distributed optimizer;
2. on TensorFlow, XLA is switched off: a compiled function cannot call the host;
3. a ``LossScaleOptimizer`` that ``compile`` put around the distributed optimizer becomes the distributed one, so that
   ranks reduce gradients *before* it checks whether they are finite, with the same result on all ranks;
4. with the xla engine, on JAX, its steps run on the devices of all ranks (``spmd_trainer.py``). They then compute the
   gradients, the metrics and the random numbers of the global batch, and no gradient is reduced on the host. An
   optimizer that does not reduce all gradients over all ranks (a process set, local variables) reduces them through
   the host, as with other engines.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from choros.training.distributed_optimizer import join as join_optimizer
from choros.training.distributed_optimizer import move_outwards, reducer_of
from choros.training.model_variables import model_variables
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.variables import broadcast_variables

__all__ = ["attach", "is_spmd", "join", "spans_ranks"]

_ATTRIBUTE = "_choros_spmd_trainer"
#: The mark of a training step that reports its examples; ``functools.wraps`` copies it to wrappers.
_REPORTS = "_choros_reports_examples"


def attach(model: Any) -> OptimizerReducer | None:
    """Prepares ``model`` for training with its distributed optimizer.

    Returns:
        The reducer of its optimizer; ``None`` if that is not a distributed one.
    """
    optimizer = getattr(model, "optimizer", None)
    if move_outwards(optimizer):
        model.train_function = None
    reducer = reducer_of(optimizer)
    if reducer is None:
        return None
    if (mesh := _mesh()) is not None:
        _make_spmd(model, mesh)
    if not reducer.reducer.active:
        return reducer
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        model.jit_compile = False
    if not hasattr(model.train_step, _REPORTS):
        model.train_step = _report_examples(model, model.train_step)
        model.train_function = None
    return reducer


def is_spmd(model: Any) -> bool:
    """Whether the model's training steps see the batches of all ranks."""
    trainer = getattr(model, _ATTRIBUTE, None)
    return trainer is not None and trainer.is_in_use


def join(model: Any) -> None:
    """Participates in the steps of the ranks that still have batches this epoch, until no rank has any."""
    if is_spmd(model):
        last = getattr(model, _ATTRIBUTE).join()
        if last is not None:
            broadcast_variables(model_variables(model, seeds=True), last)
    else:
        join_optimizer(model.optimizer)


def spans_ranks() -> bool:
    """Whether training steps are compiled for the devices of all ranks, which must compile the same step."""
    return _mesh() is not None


def _mesh() -> Any:
    """The mesh of all ranks' devices; ``None`` if arrays cannot span them or there is only one."""
    if keras.backend.backend() != "jax":
        return None
    from choros.comm.engines import xla

    mesh = xla.mesh()
    return None if mesh is None or mesh.size == 1 else mesh


def _make_spmd(model: Any, mesh: Any) -> None:
    if hasattr(model, _ATTRIBUTE):
        return
    from choros.training.mesh_ranks import Ranks
    from choros.training.spmd_trainer import SpmdTrainer

    model.train_step = _report_examples(model, model.train_step)
    # Bypasses Keras' attribute tracking: the trainer is not part of the model.
    object.__setattr__(model, _ATTRIBUTE, SpmdTrainer(model, mesh, Ranks(), lambda: _trains_with_all(model)))


def _trains_with_all(model: Any) -> bool:
    reducer = reducer_of(model.optimizer)
    return reducer is not None and reducer.reduces_all


def _report_examples(model: Any, train_step: Any) -> Any:
    """Wraps ``train_step(data)``, ``train_step(state, data)`` on JAX, so that it first reports the batch's examples."""

    @functools.wraps(train_step)
    def step(*args: Any) -> Any:
        reducer = reducer_of(model.optimizer)
        if reducer is None:
            return train_step(*args)
        with reducer.batch_of(_examples(args[-1]), of_all_ranks=is_spmd(model)):
            return train_step(*args)

    setattr(step, _REPORTS, True)
    return step


def _examples(data: Any) -> Any:
    """The first dimension of the batch's first array: a number, or a tensor if the shape is not known."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return keras.ops.shape(first)[0]
