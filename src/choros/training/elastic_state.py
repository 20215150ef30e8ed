"""Horovod's states of elastic training for Keras models and lists of variables, and its callbacks."""

import weakref
from collections.abc import Sequence
from typing import Any, final

import keras

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.elastic.state import ObjectState, State
from choros.errors import ConfigError, HostsUpdatedInterrupt
from choros.training.distributed_optimizer import commit_together, cut_anew, reduce_early, reducer_of
from choros.training.keras_internals.fit import drop_jax_state, sync_jax_state
from choros.training.keras_internals.models import is_built, optimizers_of
from choros.training.sliced_optimizer import assign_whole, has_slices, whole_values
from choros.training.trainer import model_variables
from choros.training.variables import broadcast_variables, derive_again, value_of
from choros.training.whole_state import host_value


class VariablesState(ObjectState):
    """The values of variables, and objects, as for ``ObjectState``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._values: list[Any] = []
        self.save()

    def tracked(self) -> Sequence[Any]:
        """Returns the variables, the same list on every rank."""
        raise NotImplementedError

    def save(self) -> None:
        """Copies the values, and the objects."""
        values = [value_of(variable) for variable in self.tracked()]
        self._values = [adapter_of(value).to_host(value).copy() for value in values]
        super().save()

    def restore(self) -> None:
        """Sets the values and the objects to those of the last ``save``."""
        for variable, value in zip(self.tracked(), self._values, strict=True):
            variable.assign(value)
        derive_again(self.tracked())
        super().restore()

    def sync(self) -> None:
        """Sends the values and objects of rank 0 to all ranks, and saves them."""
        broadcast_variables(self.tracked(), root_rank=0)
        super().sync()
        self.save()

    def committed(self) -> Any:
        """Returns the values and the objects."""
        return {"values": self._values, "objects": super().committed()}

    def use(self, committed: Any) -> None:
        """Takes them."""
        self._values = committed["values"]
        super().use(committed["objects"])


class KerasState(VariablesState):
    """The state of a Keras model and its optimizer.

    Args:
        model: a built and compiled model.
        optimizer: its optimizer, if it is not compiled into the model.
        kwargs: further objects, such as ``epoch=0, batch=0``.

    Raises:
        ConfigError: the model is not built.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        >>> state.commit()
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise ConfigError("the model must be built before its state is: call model.build(input_shape) before.")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if (reducer := reducer_of(self.optimizer)) is not None:
            reducer.commit = weakref.WeakMethod(super()._commit)
        super().__init__(**kwargs)

    def _commit(self) -> None:
        reducer = reducer_of(self.optimizer)
        if reducer is None or not reducer.process_set.communicator.elastic:
            super()._commit()
        else:
            commit_together(reducer)

    def save(self) -> None:
        """Copies the values and the objects; the gradients of micro-batches since the last update are among them."""
        sync_jax_state(self.model)
        for each in self._optimizers:
            reduce_early(each)
        super().save()

    def sync(self) -> None:
        """Sends the values and objects of rank 0 to all ranks, and each its slices of the optimizers' state."""
        sliced = [each for each in self._optimizers if has_slices(each)]
        if sliced and global_process_set.communicator.elastic:
            try:
                for each in sliced:
                    cut_anew(each, self.model)
            finally:
                super().save()  # if another rank is lost before all have received the rest, these slices are restored
        super().sync()

    @property
    def _optimizers(self) -> list[Any]:
        """The optimizers that are built; a model may have several."""
        every = {id(each): each for each in (self.optimizer, *optimizers_of(self.model)) if each is not None}
        return [each for each in every.values() if each.built]

    def committed(self) -> Any:
        """Returns the values and the objects; the optimizers' are those of one process."""
        given, optimizers = super().committed(), self._optimizers
        own = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
        values = [
            each for variable, each in zip(self.tracked(), given["values"], strict=True) if id(variable) not in own
        ]
        return {**given, "values": values, "optimizers": [list(whole_values(each)) for each in optimizers]}

    def use(self, committed: Any) -> None:
        """Takes them."""
        variables, optimizers, states = self.tracked(), self._optimizers, committed["optimizers"]
        if len(optimizers) != len(states):
            raise ConfigError(
                f"the commit has the state of {len(states)} optimizers, and {len(optimizers)} are built: build all "
                "optimizers of the model before its state is created."
            )
        for optimizer, values in zip(optimizers, states, strict=True):
            assign_whole(optimizer, values)
        own = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
        others = iter(committed["values"])
        values = [host_value(each) if id(each) in own else next(others) for each in variables]
        super().use({**committed, "values": values})

    def restore(self) -> None:
        """Sets the values and the objects, and forgets micro-batches since."""
        for each in self._optimizers:
            if (reducer := reducer_of(each)) is not None:
                reducer.reducer.forget_accumulated()
        drop_jax_state(self.model)
        super().restore()

    def check_host_updates(self) -> None:
        """See ``State``."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            for each in self._optimizers:
                reduce_early(each)  # a new rank takes no part in it
            raise

    def tracked(self) -> Sequence[Any]:
        """Returns the variables of the model and of the optimizer."""
        variables = model_variables(self.model, seeds=True)
        if self.optimizer is not None:
            if not self.optimizer.built:
                self.optimizer.build(self.model.trainable_variables)
            known = {id(variable) for variable in variables}
            variables += [variable for variable in self.optimizer.variables if id(variable) not in known]
        return variables


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every ``batches_per_commit`` batches, and at the end of each epoch.

    Args:
        state: the state.
        batches_per_commit: a commit copies all weights: less often takes less time, and loses more steps with a rank.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from 0, as other ranks may have begun now."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits after each ``batches_per_commit`` batches."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.commit()

    def commit(self) -> None:
        """Commits; a subclass may do more."""
        _ = self.model  # on JAX, which has the weights elsewhere during an epoch, this brings them here
        self.state.commit()


@final
class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets ``state.batch`` to the batch that has ended, and to 0 at the end of an epoch.

    The progress bar of an epoch that begins again shows ``state.batch`` steps fewer.

    Args:
        state: has an attribute ``batch``. Put this callback before a ``CommitStateCallback``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._steps: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets the number of steps, which may be another with other ranks."""
        self._steps = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells the progress bar how many steps are left."""
        if self.params.get("steps"):
            self._steps = self._steps or self.params["steps"]
            self.params["steps"] = self._steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sets the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sets it to 0."""
        self.state.batch = 0


@final
class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets ``state.epoch`` to the number of epochs that have ended, in all calls of ``fit``.

    Args:
        state: has an attribute ``epoch``; call ``fit(epochs=epochs - state.epoch)``. Put this callback before a
            ``CommitStateCallback``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from the epoch of the state."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds one."""
        self.state.epoch = self._first + epoch + 1
