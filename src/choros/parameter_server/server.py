"""The parameter server: shards of variables, the optimizers that update them, and who asks for it."""

import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import keras

from choros.comm import Array
from choros.errors import ConfigError
from choros.parallel.reduce.gradients import SparseRows
from choros.parameter_server.cluster import CHIEF, JobServer, this_process
from choros.parameter_server.messages import Changed, Hello, Updated
from choros.parameter_server.placement import Shard, SlotKey
from choros.parameter_server.scope_objects import host
from choros.parameter_server.slots import Slots
from choros.training.keras_internals.models import (
    count_step,
    drop_quietly,
    exclude_from_weight_decay,
    trained_variables,
)
from choros.transport.channel import Channel, ChannelClosed, Failure

_log = logging.getLogger(__name__)


@final
class Shards:
    """The shards of one server and locked requests on them; set ``compiled`` before optimizers are registered."""

    def __init__(self) -> None:
        self.compiled = True
        self._lock = threading.Lock()
        self._version = 0
        self._changed: dict[Shard, int] = {}
        self._variables: dict[Shard, Any] = {}
        self._optimizers: dict[int, _Optimizer] = {}

    def assign(self, values: Mapping[Shard, Array]) -> None:
        """Assigns values to variables; creates those that do not exist. Optimizers start from slots assigned before."""
        with self._lock:
            for shard, value in values.items():
                if shard in self._variables:
                    self._variables[shard].assign(value)
                else:
                    dtype = keras.backend.standardize_dtype(value.dtype)
                    # No gradients are computed here, and torch does not allow trainable integers.
                    self._variables[shard] = keras.Variable(value, dtype=dtype, trainable=False)
            self._touch(values)

    def register(self, number: int, pickled: bytes, updated: Updated) -> None:
        """Creates an optimizer from its pickled class and configuration, for the shards here, unless it exists."""
        with self._lock:
            if number not in self._optimizers:
                kind, config = pickle.loads(pickled)  # noqa: S301  (from an authenticated process)
                optimizer = _Optimizer(number, kind.from_config(config), updated, self._variables, self.compiled)
                for shard, slot in optimizer.slots.items():
                    if shard in self._variables:
                        slot.assign(host(self._variables[shard]))
                self._variables.update(optimizer.slots)
                self._optimizers[number] = optimizer

    def pull(self, known: int, slots: bool) -> Changed:
        """Returns the shards that changed since version ``known``, those of optimizer slots only for ``slots``."""
        with self._lock:
            return self._since(known, slots=slots)

    def push(self, number: int, gradients: Mapping[Shard, Any], learning_rate: float | None, known: int) -> Changed:
        """Applies gradients, accumulated and clipped, or counts a step that has none for the variables here; no
        ``learning_rate`` with a schedule; returns as ``pull``.
        """
        with self._lock:
            optimizer = self._optimizers[number]
            optimizer.apply(gradients, learning_rate)
            self._touch([*gradients, *optimizer.slots])
            return self._since(known, slots=False)

    def average(self, number: int) -> None:
        """Overwrites the variables of an optimizer with ``use_ema`` with their moving averages."""
        with self._lock:
            if number in self._optimizers:
                self._touch(self._optimizers[number].average())

    def _touch(self, shards: Iterable[Shard]) -> None:
        self._version += 1
        for shard in shards:
            self._changed[shard] = self._version

    def _since(self, known: int, *, slots: bool) -> Changed:
        changed = [shard for shard, version in self._changed.items() if version > known]
        requested = [shard for shard in changed if slots or shard.is_count or not isinstance(shard.variable, SlotKey)]
        return self._version, {shard: host(self._variables[shard]) for shard in requested}


@final
class _Optimizer:
    """A Keras optimizer of the shards that this server stores, with its slots by shard."""

    def __init__(
        self, number: int, optimizer: Any, updated: Updated, variables: Mapping[Shard, Any], compiled: bool
    ) -> None:
        order = list(updated)
        self._shards = sorted(
            (shard for shard in variables if shard.variable in updated),
            key=lambda shard: (order.index(shard.variable), shard.begin),
        )
        if not self._shards:
            raise ConfigError(
                "an optimizer was applied to variables that no parameter server stores: build the model in the scope "
                "before the first schedule(), for example with keras.Input or model.build(shape)."
            )
        self._optimizer = optimizer
        self._variables = [variables[shard] for shard in self._shards]
        without_decay = []
        for shard, variable in zip(self._shards, self._variables, strict=True):
            decays, variable.constraint = updated[shard.variable]
            if not decays:
                without_decay.append(variable)
        exclude_from_weight_decay(optimizer, without_decay)
        drop_quietly(optimizer)
        slots = Slots(optimizer)
        slots.build(self._variables, optimizer.build)
        shards = dict(zip(map(id, self._variables), self._shards, strict=True))
        self.slots = {_slot(number, index, shards.get(id(variable))): slot for index, variable, slot in slots}
        self._update = _update_of(optimizer, compiled)

    def apply(self, gradients: Mapping[Shard, Any], learning_rate: float | None) -> None:
        if not gradients.keys() <= set(self._shards):
            raise ConfigError(
                "gradients of variables that the optimizer does not know: another worker has applied it first, to "
                "others. Build it in the scope for all of them, as by optimizer.build(model.trainable_variables)."
            )
        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        convert = keras.ops.convert_to_tensor

        def tensors(gradient: Any) -> Any:
            if isinstance(gradient, SparseRows):
                return convert(gradient.values), convert(gradient.indices)
            return convert(gradient)

        if gradients:
            self._update([tensors(gradients[shard]) if shard in gradients else None for shard in self._shards])
        else:
            count_step(self._optimizer)

    def average(self) -> Sequence[Shard]:
        self._optimizer.finalize_variable_values(self._variables)
        return self._shards


def _slot(optimizer: int, index: int, parent: Shard | None) -> Shard:
    if parent is None:
        return Shard(SlotKey(optimizer, index))
    return replace(parent, variable=SlotKey(optimizer, index, parent.variable))


def _update_of(optimizer: Any, compiled: bool) -> Callable[[list[Any]], None]:
    """Returns ``optimizer.apply``, compiled for the frameworks that profit from it."""
    framework = keras.backend.backend()
    if not compiled and framework == "jax":
        return optimizer.apply  # type: ignore[no-any-return]
    match framework:
        case "tensorflow":
            import tensorflow as tf

            def apply(gradients: list[Any]) -> None:
                applied = [
                    tf.IndexedSlices(*each, tf.shape(variable.value)) if isinstance(each, tuple) else each
                    for each, variable in zip(gradients, trained_variables(optimizer), strict=True)
                ]
                optimizer.apply(applied)

            return tf.function(apply, autograph=False, reduce_retracing=True) if compiled else apply
        case "jax":
            import jax

            stateless = jax.jit(optimizer.stateless_apply)

            def update(gradients: list[Any]) -> None:
                variables = [*trained_variables(optimizer), *optimizer.variables]
                own = [variable.value for variable in optimizer.variables]
                trained = [variable.value for variable in trained_variables(optimizer)]
                new, state = stateless(own, gradients, trained)
                for variable, value in zip(variables, [*new, *state], strict=True):
                    variable.assign(value)

            return update
        case _:
            import torch

            return torch.no_grad()(optimizer.apply)  # type: ignore[no-any-return]


def serve_shards(server: JobServer, channel: Channel, hello: Hello) -> None:
    """Answers the requests of a chief or a worker. A chief's connection is a job: its variables are forgotten with it.
    There may be several, as when a process creates one strategy after another.
    """
    job, process = hello
    try:
        if channel.peer != CHIEF:
            _answer(channel, process, server.jobs.get(job, Shards()))
            return
        shards = Shards()
        with server.job(job, shards):
            _answer(channel, process, shards)
    except ChannelClosed:
        _log.info("%s disconnected", channel.peer)


def _answer(channel: Channel, process: tuple[str, int], shards: Shards) -> None:
    # Compiled updates need threads of the framework, which steps may hold that wait for the update.
    shards.compiled &= process != this_process()
    while (request := channel.receive()) is not None:
        method, arguments = request
        try:
            reply = getattr(shards, method)(*arguments)
        except Exception as error:  # noqa: BLE001  (every error is reported to the client)
            reply = Failure.of(error)
        channel.send(reply)
