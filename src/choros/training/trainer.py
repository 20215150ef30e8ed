"""How a model's training step is told apart from Keras' own: the one module that touches a model.

A choros callback calls ``attach`` before Keras builds the training function. It changes things of *this*
model object, none of which is saved with it:

1. ``train_step`` tells the distributed optimizer how many examples its batch has;
2. on TensorFlow, XLA is switched off: a compiled function cannot call the host;
3. a ``LossScaleOptimizer`` that ``compile`` put around the distributed optimizer becomes the distributed
   one, so that ranks exchange gradients *before* it asks whether they are finite, and all get one answer;
4. with the xla engine, on JAX, its steps are led over the devices of all ranks (``spmd_trainer.py``). They then
   compute the gradients, the metrics and the random numbers of the global batch, and nothing is exchanged.
   An optimizer that does not train everything with everybody (a process set, local variables) exchanges
   through the host as with other engines.
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

__all__ = ["attach", "is_spread", "join"]

_ATTRIBUTE = "_choros_spread"
#: On our training step, and on what ``functools.wraps`` makes of it.
_COUNTS = "_choros_counts_examples"


def attach(model: Any) -> OptimizerReducer | None:
    """Prepares ``model`` for training with its distributed optimizer.

    Returns:
        The optimizer's reducer; ``None`` if it is not a distributed one.
    """
    optimizer = getattr(model, "optimizer", None)
    if move_outwards(optimizer):
        model.train_function = None
    reducer = reducer_of(optimizer)
    if reducer is None:
        return None
    if (mesh := _mesh()) is not None:
        _spread(model, mesh)
    if not reducer.reducer.active:
        return reducer
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        model.jit_compile = False
    if not hasattr(model.train_step, _COUNTS):
        model.train_step = _counting_examples(model, model.train_step)
        model.train_function = None
    return reducer


def is_spread(model: Any) -> bool:
    """Whether the model's training steps see the batches of all ranks."""
    spread = getattr(model, _ATTRIBUTE, None)
    return spread is not None and spread.is_in_use


def join(model: Any) -> None:
    """Goes along with the ranks that still have batches this epoch, until none has."""
    if is_spread(model):
        last = getattr(model, _ATTRIBUTE).join()
        if last is not None:
            broadcast_variables(model_variables(model, seeds=True), last)
    else:
        join_optimizer(model.optimizer)


def _mesh() -> Any:
    """The devices of all ranks, if arrays can span them and there are several."""
    if keras.backend.backend() != "jax":
        return None
    from choros.comm.engines import xla

    mesh = xla.mesh()
    return None if mesh is None or mesh.size == 1 else mesh


def _spread(model: Any, mesh: Any) -> None:
    if hasattr(model, _ATTRIBUTE):
        return
    from choros.training.mesh_ranks import Ranks
    from choros.training.spmd_trainer import SpreadModel

    model.train_step = _counting_examples(model, model.train_step)
    # Past Keras' attribute tracking: this is no part of the model.
    object.__setattr__(model, _ATTRIBUTE, SpreadModel(model, mesh, Ranks(), lambda: _trains_with_all(model)))


def _trains_with_all(model: Any) -> bool:
    reducer = reducer_of(model.optimizer)
    return reducer is not None and reducer.reduces_all


def _counting_examples(model: Any, train_step: Any) -> Any:
    """``train_step`` of ``data``, or of ``(state, data)`` on JAX, that first says how large the batch is."""

    @functools.wraps(train_step)
    def step(*args: Any) -> Any:
        reducer = reducer_of(model.optimizer)
        if reducer is None:
            return train_step(*args)
        with reducer.batch_of(_examples(args[-1]), of_all_ranks=is_spread(model)):
            return train_step(*args)

    setattr(step, _COUNTS, True)
    return step


def _examples(data: Any) -> Any:
    """The first dimension of the batch's first array: a number, or a tensor where shapes are not known."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return keras.ops.shape(first)[0]
