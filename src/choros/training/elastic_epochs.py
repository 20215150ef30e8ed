"""The epochs of ``fit`` in a job that ranks leave and join: each example of an epoch is trained on exactly once.

::

    on_epoch_begin    the ledger gives each rank a shard           rank 0: shard 0    rank 1: shard 1    rank 2: shard 2
    steps             all ranks make each together                 0 1 2 3 4 5        0 1 2 ✗            0 1 2 3 4 5
    end of batches    ranks without batches join the others
    what is left      sharded over the ranks that are left         shard 1: 3, 5                         shard 1: 4
    validation, on_epoch_end, callbacks
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import keras
import numpy as np

from choros.arrays import adapter_of, framework_adapter
from choros.comm import NEWCOMER, global_process_set, on_change, openings
from choros.comm.primitives import Change
from choros.data.epochs import EpochData
from choros.data.plan import Ledger, ShardBatches
from choros.elastic.preemption import all_are_here, end_job, job_ends, leave_if_asked, watch_signals
from choros.errors import PeerLostError
from choros.parallel.identical import digest
from choros.parallel.structure import leaves, map_structure
from choros.settings import current
from choros.training.keras_internals.models import own_methods
from choros.training.replaced import replaced

_log = logging.getLogger("choros")
_NOT_DISTRIBUTED = (
    "no optimizer of the model is distributed, as with LocalSGDCallback and DiLoCoCallback, so that ranks do not count "
    "each other's steps, and a lost rank's rows are left out in this epoch and in those that follow; nothing is "
    "committed within an epoch."
)
_VARIES = (
    "the training step does not apply its optimizer the same number of times for each batch, by which ranks count "
    "steps: if a rank is lost, not every example of the epoch is used exactly once."
)


@final
class ElasticEpochs:
    """What this rank trains on in each epoch, by a ledger that is the same on all ranks. All call ``commit`` and
    ``admit`` (``None``: none in this job) together between two steps; ``is_late``: others took it in amid ``fit``.
    """

    commit: Callable[[], None] | None = None
    admit: Callable[[int], bool] | None = None
    is_late = False

    def __init__(
        self, data: EpochData, steps: Any, class_weight: Mapping[int, float] | None = None, per_call: int = 1
    ) -> None:
        """``steps``: the model's ``trainer.Steps``, of which it makes ``per_call`` at once."""
        data.begin_fit()
        self.data = data
        self._steps = steps
        self._class_weight = class_weight
        self._ledger: Ledger | None = None
        self._counted = self._committed = 0
        self._per_call = per_call
        #: How often a step applies the optimizer by which steps are counted, such as a WGAN's critic; 0: not known yet.
        self._applied = 0
        #: ``Steps.batches`` before this rank's last call of the epoch, if there was one.
        self._before: int | None = None
        self._varies = False
        #: The ledger with which the next epoch begins: of a commit or, if this rank ``_has_come``, of the others.
        self._begins: Ledger | None = None
        self._order: int | None = None
        self._commit_steps = current().commit_steps
        #: Whether the others have taken this rank in since the last epoch.
        self._has_come = False

    @property
    def ledger(self) -> Ledger | None:
        """That of the current epoch; ``None`` outside of epochs."""
        applied = max(1, self._applied)
        steps = (self._steps.batches - self._counted) // applied
        if self._ledger is not None and steps > 0:
            self._ledger = self._ledger.stepped(steps)
            self._counted += steps * applied
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger | None) -> None:
        self._ledger, self._counted = ledger, self._steps.batches

    @contextmanager
    def following(self) -> Iterator[None]:
        """The context of ``fit``, which follows what happens to the ranks; if too few are left, they commit."""
        doubt = self.data.doubt if self._steps.optimizers else _NOT_DISTRIBUTED
        if doubt is not None and global_process_set.rank() == 0:
            _log.warning("if a rank is lost, not every example of the epoch is used exactly once: %s", doubt)
        with ExitStack() as stack:
            stack.callback(setattr, self, "ledger", None)
            stack.callback(on_change(self._on_change))
            # In another opening, the state of which this call is a part is what is committed.
            stack.callback(watch_signals(None if openings() else lambda: self.commit is not None))
            try:
                yield
            except PeerLostError:
                self._commit_after_loss()
                raise

    def begin(self, epoch: int) -> None:
        """Shards an epoch over the ranks, before Keras reads it."""
        self.ledger = self._before = None
        communicator, has_come = global_process_set.communicator, self._has_come
        if not has_come:  # the others are here; else one that saves alone is to come before rows are shared out
            communicator.barrier(name="begin of an epoch")
            self._steps.cut_anew(have_met=True)
        admits = self.admit if has_come or self._begins is None else None  # a new rank knows no resumed epoch
        while admits is not None and admits(epoch):
            pass
        begins, self._begins, self._has_come = self._begins, None, False
        if begins is not None and not has_come:
            begins = begins.resumed(communicator.size, self.data.length(epoch)) if begins.epoch == epoch else None
        self.ledger = begins or Ledger.of_epoch(epoch, communicator.size)
        if begins is not None:
            self._check_order(epoch)
        self._committed = self.ledger.steps
        if self.commit is not None and self._commit_steps:  # later, the data are being read
            self._order = self._order_of(epoch)
        self.data.begin_epoch(epoch, self.ledger.of_rank(communicator.rank))

    @property
    def position(self) -> dict[str, Any]:
        """Where the ranks are in the epoch, as plain values for a commit."""
        ledger = self.ledger
        ledger_json = None if ledger is None else ledger.to_json()
        return {"ledger": ledger_json, "seed": self.data.seed, "order": self._order, "applied": self._applied}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Makes the epoch of a ``position`` go on from there, when it begins, with the ranks that there are now."""
        self.data.seed = position["seed"]
        self._begins = None if position["ledger"] is None else Ledger.from_json(position["ledger"])
        self._order = position["order"]
        self._applied = position.get("applied", 0)  # earlier commits have none

    def take_over(self, position: Mapping[str, Any]) -> None:
        """Makes a ``position`` of the other ranks that of this rank, which they have taken in."""
        self.resume(position)
        self.is_late = self._has_come = True

    def example_batch(self) -> Any:
        """Returns a batch, from which metrics can be built; ``None`` if the data can be read only once."""
        batch = next(self.data.batches([ShardBatches(0, 1, range(1))], self.data.epoch), None)
        self.data.begin_epoch(self.data.epoch, self.data.parts)  # a stream has drawn other seeds since
        return batch

    def _order_of(self, epoch: int) -> int:
        """Returns a number for the order of an epoch: that of its first batch."""
        first = next(self.data.batches([ShardBatches(0, 1, range(1))], epoch), ())
        return digest([each for each in leaves(first) if each is not None])

    def _check_order(self, epoch: int) -> None:
        order, self._order = self._order, None
        tells = self.is_late or global_process_set.communicator.rank == 0
        if order is not None and order != self._order_of(epoch) and tells:
            _log.warning(
                "the data are not in the order of %s, so not every example of epoch %d is used exactly once: set all "
                "seeds at the begin of the script, by keras.utils.set_random_seed.",
                "the other ranks" if self.is_late else "the run that has written the commit",
                epoch + 1,
            )

    def begin_call(self) -> None:
        """All call it before each batch, or before as many as Keras makes steps at once."""
        self._count_call()
        self.between_steps()

    def between_steps(self) -> None:
        """All call it after each step: ends rank or job if asked, takes new ranks in, but not between micro-batches."""
        if self._steps.accumulated:
            return
        self._steps.cut_anew()
        communicator = global_process_set.communicator
        while communicator.noticed or communicator.is_new:
            self._before = None  # others may make steps meanwhile
            if self.job_ends:
                if not self._steps.optimizers and not all_are_here():
                    break  # LocalSGDCallback alone knows how to end an epoch's batches
                self._steps.end_batches()  # as ranks without batches do, which come back, too
            self._end_if_asked()
            if self.admit is None or not communicator.noticed & NEWCOMER or not self._has_place:
                break
            self._steps.join()  # so that the state which it receives is that of all
            order, self._order = self._order, self._order_of(self.data.epoch)
            if self.admit(self.data.epoch) and self.ledger is not None:
                self._committed = self.ledger.steps  # a new rank counts from here
            self._order = order
        if self.commit is None or not self._commit_steps:
            return
        ledger = self.ledger
        if ledger is not None and ledger.steps - self._committed >= self._commit_steps:
            self._committed = ledger.steps
            self.commit()

    def _count_call(self) -> None:
        """Learns from this rank's last call how often its steps apply the optimizer; it has come to its end."""
        before, self._before = self._before, self._steps.batches
        if before is None or self._varies:
            return
        applied = self._before - before
        if not self._applied:
            self._applied = applied // self._per_call
        if applied != self._applied * self._per_call:
            self._varies = True
            if global_process_set.rank() == 0:
                _log.warning(_VARIES)

    def _commit_after_loss(self) -> None:
        if self.commit is None or global_process_set.communicator.size >= current().min_np:
            return
        try:
            if (ledger := self.ledger) is not None:
                self.ledger = ledger.taken_back(self._steps.accumulated)
            self._steps.forget_accumulated()
            self._order = self._order_of(self.data.epoch)
            self.commit()
        except Exception as error:  # noqa: BLE001  (the loss is what is raised)
            _log.warning("the last step is not committed: %s: %s", type(error).__name__, error)

    @property
    def _has_place(self) -> bool:
        """Whether a new rank can take over what a lost one has left, from the next step on."""
        if self.ledger is None or not self.data.begins_anywhere:
            return False
        return self.ledger.has_place(self.data.length(self.ledger.epoch))

    def finish(self, model: Any) -> None:
        """Ends the epoch's batches on all ranks at once, and trains on what lost ranks have left over."""
        communicator = global_process_set.communicator
        # Else the last call may have made fewer steps, or none where Keras has found that there is no further batch.
        if self._per_call == 1 and self._before != self._steps.batches:
            self._count_call()
        while True:
            self._steps.end_batches()
            self._steps.cut_anew()
            self._end_if_asked()
            ledger = self.ledger
            if ledger is None or not ledger.lacks_owners or ledger.is_done(length := self.data.length(ledger.epoch)):
                return
            ledger = self.ledger = ledger.resharded(communicator.size, length)
            self._committed = 0
            for batch in map(_of_backend, self.data.batches(ledger.of_rank(communicator.rank), ledger.epoch)):
                x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
                if "train_step" in own_methods(model) and weights is None and self._class_weight is None:
                    x, y = _AsInFit(batch), None
                with replaced(model, reset_metrics=lambda: None):  # train_on_batch would
                    model.train_on_batch(x, y, weights, self._class_weight)
                self.between_steps()

    @property
    def job_ends(self) -> bool:
        """Whether all ranks are to commit and end."""
        return self.commit is not None and job_ends()

    def end_if_job_ends(self) -> None:
        """Commits and ends this rank, if all are to; all ranks call it together."""
        if self.commit is not None and job_ends():
            self._order = self._order_of(self.data.epoch)  # the data are read no more
            end_job(self.commit)

    def _end_if_asked(self) -> None:
        self.end_if_job_ends()
        leave_if_asked(one_by_one=True)

    def _on_change(self, change: Change) -> None:
        if self._has_come and self._begins is not None:  # of the epoch which this rank, just taken in, has not begun
            self._begins = _changed(self._begins, change, 0)
        ledger = self.ledger
        if ledger is not None:
            self._ledger = _changed(ledger, change, self._steps.accumulated)  # the setter would forget part of a step


def _changed(ledger: Ledger, change: Change, accumulated: int) -> Ledger:
    ledger = ledger.lost(change.new_ranks, accumulated)
    for rank in change.joined:
        ledger = ledger.joined(rank)
    return ledger


def _of_backend(batch: Any) -> Any:
    """A batch as ``fit`` reads it: of arrays that Keras' backend knows, not those of the data set's own framework."""
    known = [framework_adapter(each) for each in ("numpy", keras.backend.backend())]

    def own(leaf: Any) -> Any:
        adapter = adapter_of(leaf)
        return leaf if adapter in known else adapter.to_host(leaf)

    return map_structure(own, batch)


class _AsInFit(NamedTuple):
    """A batch that ``train_on_batch`` would hand to the user's own step as ``(x, None, None)`` or ``(x, y, None)``."""

    batch: Any


def as_in_fit(data: Any) -> Any:
    """What a training step receives, in the form in which ``fit`` passes it."""
    if not (isinstance(data, tuple) and data and isinstance(data[0], _AsInFit)):
        return data

    def tensor(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

    return map_structure(tensor, data[0].batch) if keras.backend.backend() == "torch" else data[0].batch
