"""Keras' ``fit`` and ``evaluate``: what they compute of losses, what they read, how they begin and end."""

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

import keras
from keras.src.losses import loss as losses
from keras.src.losses.loss import apply_mask as apply_mask
from keras.src.metrics import reduction_metrics
from keras.src.trainers.data_adapters.array_slicing import train_validation_split as train_validation_split
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import pythonify_logs as pythonify_logs

from choros.training.keras_internals.models import BUILT, build_from_batch, is_built
from choros.training.replaced import replaced

# Imported unchanged for other modules: apply_mask, how losses merge a mask with sample weights;
# train_validation_split and pythonify_logs, how fit handles validation_split and logs.

#: The parts of the state that Keras' training step on JAX takes and returns, in this order.
JAX_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def reductions(
    reduce_loss: Callable[..., Any],
    reduce_samples: Callable[..., Any],
    sum_added: Callable[..., Any],
    compute_loss: Callable[..., Any],
) -> list[tuple[Any, dict[str, Any]]]:
    """What to replace so that losses, ``Mean``, ``Sum`` and ``add_loss`` go to these: Keras' own is the first argument,
    of methods the second.
    """
    added = partialmethod(sum_added, Trainer._aggregate_additional_loss)
    computed = partialmethod(compute_loss, Trainer._compute_loss)
    samples = partial(reduce_samples, reduction_metrics.reduce_to_samplewise_values)
    return [
        (losses, {"reduce_weighted_values": partial(reduce_loss, losses.reduce_weighted_values)}),
        (reduction_metrics, {"reduce_to_samplewise_values": samples}),
        (Trainer, {"_aggregate_additional_loss": added, "_compute_loss": computed}),
    ]


def scales_of_losses(divides: Callable[[Any], Any], multiplies: Callable[[Any], Any]) -> list[tuple[Any, str, Any]]:
    """What to wrap so that means and values of ``add_loss`` are divided, and multiplied again for metrics."""
    return [
        (losses, "scale_loss_for_distribution", divides),
        (losses, "unscale_loss_for_distribution", multiplies),
        (Trainer, "_aggregate_additional_loss", divides),
    ]


@contextmanager
def epochs_of_any_length(goes_on: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A context in which ``fit`` and ``evaluate`` read data to the end: Keras would expect as many batches as in the
    first epoch, and go on with the last iterator under ``steps_per_epoch`` (now only if ``goes_on``). On JAX, without
    batches, variables would have no values, or older ones.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    catch, warn, begin = EpochIterator.catch_stop_iteration, EpochIterator._interrupted_warning, EpochIterator.__iter__

    @contextmanager
    def catching(iterator: Any) -> Iterator[None]:
        known = iterator._num_batches
        with catch(iterator):
            yield
        iterator._num_batches = known

    def warning(iterator: Any) -> None:
        if iterator.steps_per_epoch is not None:
            warn(iterator)

    def beginning(iterator: Any) -> Any:
        if not goes_on():
            iterator._current_iterator = None
        return begin(iterator)

    changes = {"catch_stop_iteration": catching, "_interrupted_warning": warning, "__iter__": beginning}
    with replaced(EpochIterator, **changes), _kept_jax_state():
        yield


@contextmanager
def _kept_jax_state() -> Iterator[None]:
    """Lets Keras, which takes the variables' values before the first batch, return them by ``jax_state_sync``."""
    if keras.backend.backend() != "jax":
        yield
        return
    from keras.src.backend.jax.trainer import JAXTrainer

    take = JAXTrainer._get_jax_state

    def taking(model: Any, *, purge_model_variables: bool = False, **wanted: bool) -> Any:
        state = take(model, purge_model_variables=purge_model_variables, **wanted)
        if purge_model_variables:
            model._jax_state = dict(zip((each for each in JAX_STATE if wanted.get(each)), state, strict=True))
        return state

    with replaced(JAXTrainer, _get_jax_state=taking):
        yield


@contextmanager
def first_epoch_without_batches(model: Any) -> Iterator[None]:
    """On JAX, ``fit``'s first epoch may have no batches here: callbacks see one, as Keras needs logs; metrics stay."""
    if keras.backend.backend() != "jax":
        yield
        return
    make, has_logs = model.make_train_function, False
    own: Any = None

    def train(state: Any, iterator: Any) -> Any:
        nonlocal has_logs
        try:
            results = own(state, iterator)
        except StopIteration:
            if has_logs:
                raise
            model.jax_state_sync()
            results = model.get_metrics_result(), state
        has_logs = True
        return results

    def is_used() -> bool:
        """Whether Keras calls ``train``, which may be timed."""
        return train in (model.train_function, getattr(model.train_function, "times", None))

    def wrap(force: bool = False) -> None:
        nonlocal own
        make(force)
        if not is_used():
            own, model.train_function = model.train_function, train

    if model.train_function is not None:  # fit has made it already
        wrap()
    with replaced(model, make_train_function=wrap):
        try:
            yield
        finally:
            if is_used():
                model.train_function = own


def initial_epoch(model: Any) -> int | None:
    """The epoch at which the current ``fit`` begins, as ``BackupAndRestore`` sets it, or ``None``: as it says."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes the current ``fit`` begin at ``epoch``, and later ones, too, which Keras leaves there."""
    model._initial_epoch = epoch


@functools.cache
def hand_over_shards() -> None:
    """Makes Keras read each epoch of a process's shard of a ``PyDataset`` from its first batch: with workers it begins
    with what these have read in an iteration before, as that which builds a model, which is not the same on all ranks.
    Rows ``of_arrays`` are handed to a step as those of arrays: of a ``PyDataset`` it would receive ``(x,)`` for ``x``,
    on PyTorch ``[x, y]``, and TensorFlow would refuse lists.
    """
    from keras.src.trainers import data_adapters

    own = data_adapters.get_data_adapter

    class ShardAdapter(data_adapters.PyDatasetAdapter):
        def _finite_enqueuer_generator(self) -> Iterator[Any]:
            self.enqueuer.ready_queue = queue.Queue()
            yield from super()._finite_enqueuer_generator()

        def _standardize_batch(self, batch: Any) -> Any:
            if not self.py_dataset.of_arrays:
                return super()._standardize_batch(batch)
            if keras.backend.backend() == "tensorflow":
                batch = keras.tree.lists_to_tuples(batch)
            return super()._standardize_batch(batch) if isinstance(batch, (list, tuple)) else batch

        def get_torch_dataloader(self) -> Any:
            loader = super().get_torch_dataloader()
            if self.py_dataset.of_arrays:
                loader.collate_fn = lambda batch: batch
            return loader

    def get_data_adapter(x: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = own(x, *args, **kwargs)
        if hasattr(x, "of_arrays"):
            adapter.__class__ = ShardAdapter
        return adapter

    data_adapters.get_data_adapter = get_data_adapter


@contextmanager
def built_before_training(model: Any) -> Iterator[None]:
    """Lets TensorFlow's ``fit``, too, build the model before its first step: replicas need the same weights by then."""

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if not is_built(model) and build_from_batch(model, data_batch, iterator):
            object.__setattr__(model, BUILT, True)

    if keras.backend.backend() != "tensorflow":
        yield
        return
    with replaced(model, _maybe_symbolic_build=build):
        yield


def abandon_test(callbacks: Any) -> None:
    """Takes back ``on_test_begin``: a list of callbacks counts it until ``on_test_end``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks._on_end()


def flatten_metrics(model: Any, results: dict[str, Any]) -> Any:
    """``results`` as ``evaluate`` returns them without ``return_dict``."""
    return model._flatten_metrics_in_order(results)


def finish_step() -> None:
    """Waits until the last step has ended, which JAX runs on while Python goes on."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def jax_state(model: Any) -> Any:
    """The values that the training step on JAX takes (``JAX_STATE``); the model lacks them while ``fit`` runs."""
    return model._get_jax_state(**dict.fromkeys(JAX_STATE, True))


def put_jax_state(model: Any, state: Sequence[Any]) -> None:
    """Assigns ``state`` to the model's variables, as Keras does when a callback reads them."""
    model._jax_state = dict(zip(JAX_STATE, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def unsynced_jax_state(model: Any) -> dict[str, Any] | None:
    """The values that the next ``jax_state_sync`` assigns to the model's variables; ``None`` if there are none."""
    state: dict[str, Any] | None = getattr(model, "_jax_state", None)
    return state if state and not model._jax_state_synced else None


def sync_jax_state(model: Any) -> None:
    """On JAX, in ``fit``: gives the model its values; Keras reads them again before its next step."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def drop_jax_state(model: Any) -> None:
    """On JAX: forgets the values of a step that has failed, as the model's variables are given others."""
    if keras.backend.backend() == "jax":
        model._jax_state, model._jax_state_synced = None, True
