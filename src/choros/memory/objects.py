"""The bytes of what Keras trains, from its objects; imported after Keras."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from choros.errors import ConfigError
from choros.memory.model import BY_ITEMS, BY_VARIABLES, UNDIVIDED, TrainedModel, VariableBytes
from choros.training.distributed_optimizer import reducer_of
from choros.training.host_gradients import nbytes
from choros.training.keras_internals.models import apply_count, innermost, optimizers_of
from choros.training.keras_internals.slice_variables import outline
from choros.training.replaced import underived
from choros.training.sliced_state import works_by_item
from choros.training.whole_state import Slot, slots


def used_optimizer(model: Any) -> Any:
    """Returns the optimizer that has made a step of ``model``; ``None`` if those are others, which its class uses."""
    optimizer = model.optimizer  # compile() without one makes one
    others = [each for each in optimizers_of(model) if each is not optimizer]
    made = optimizer is not None and int(apply_count(optimizer)) > 0
    return optimizer if made or not others else None


def trained_model(model: Any, optimizer: Any) -> TrainedModel:
    """Returns what ``model`` has, trained by ``optimizer``; ``None``: by several of its own, which are not divided."""
    variables = model.trainable_variables
    buffers = sum(map(nbytes, model.non_trainable_variables))
    if optimizer is None:
        own = [each for each in optimizers_of(model) if each is not model.optimizer]
        names = ", ".join(type(each).__name__ for each in own)
        state = sum(nbytes(variable) for each in own for variable in each.variables)
        bare = tuple(VariableBytes(math.prod(each.shape), nbytes(each), 0) for each in variables)
        return TrainedModel(names or "no optimizer", bare, UNDIVIDED, state, buffers)
    of_each = [0] * len(variables)
    inner = innermost(optimizer)
    shared = sum(nbytes(each) for each in optimizer.variables if not any(each is own for own in inner.variables))
    for slot in _slots(optimizer, variables):
        if slot.index is None:
            shared += nbytes(slot.outline)
        else:
            of_each[slot.index] += nbytes(slot.outline)
    pairs = zip(variables, of_each, strict=True)
    sizes = tuple(VariableBytes(math.prod(each.shape), nbytes(each), state) for each, state in pairs)
    return TrainedModel(type(inner).__name__, sizes, _division(optimizer), shared, buffers)


def _slots(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """The optimizer's variables, as one that is not built yet would create them."""
    reducer = reducer_of(optimizer)
    if reducer is not None and reducer.state is not None:
        return reducer.state.slots
    inner = innermost(optimizer)
    kind: Any = underived(type(inner))
    try:
        fresh = kind.from_config(inner.get_config())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the state of {type(inner).__name__} is not known: it cannot be made again from its get_config() "
            f"({error}). Let get_config() return all arguments of its __init__."
        ) from error
    return slots(partial(outline, fresh, fresh.variables), variables)


def _division(optimizer: Any) -> str:
    try:
        return BY_ITEMS if works_by_item(optimizer) else BY_VARIABLES
    except ConfigError:  # shard_state refuses it
        return UNDIVIDED
