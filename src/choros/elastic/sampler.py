"""The sampler of elastic training: each example of an epoch once, whatever ranks are lost or join."""

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from choros.comm import Reduction, global_process_set, on_change
from choros.comm.context import rank, size
from choros.comm.primitives import Change
from choros.data.plan import Ledger
from choros.elastic.preemption import leave_if_asked, watch_signals


class ElasticSampler:
    """Yields the indices of this rank's examples, without those that were processed (Horovod's ``ElasticSampler``).

    The ranks' numbers of examples differ by at most one. In a loop without ``has_left()``, as scripts for Horovod have
    it, a rank that would have a batch, or a whole one, less than others repeats one example in its place. A loop with
    ``has_left()`` repeats none: its ranks may train a different number of batches, and ``join()`` at the end.

    With ``hvd.elastic.run``, pass it to the ``TorchState``. Without, a loop survives the loss of ranks by one line::

        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            while sampler.has_left():                         # what lost ranks have left over, at last
                for index, (x, y) in enumerate(loader):
                    …
                    optimizer.step()
                    sampler.record_batch(index, batch_size)
                hvd.join()

    Args:
        dataset: has a length, which does not change.
        shuffle: whether each epoch has another order.
        seed: that of the order; the same on all ranks.

    Example:
        >>> import choros
        >>> choros.init()
        >>> sampler = ElasticSampler(range(5), shuffle=False)
        >>> sampler.record_batch(0, 2)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3, 4]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        # A batch of the ledger is one example: shard k of n has the elements k, n + k, 2 n + k, … of the epoch's order.
        self._ledger = Ledger.of_epoch(0, size())
        self._batch_size = self._last_batch_size = 0
        self._joins = self._restored = False
        #: The ledger of the last iteration that ``has_left`` has begun.
        self._begun: Ledger | None = None
        on_change(self._changed)
        watch_signals()

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._ledger.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; goes on with one that has begun and is not done, or that was done in the restored state.

        Horovod's begins it anew, and must not be called at the beginning of a function that ``elastic.run`` calls.

        Args:
            epoch: the epoch, which determines the order.
        """
        restored, self._restored, self._begun = self._restored, False, None
        if epoch != self.epoch or (self._ledger.is_done(self._length) and not restored):
            self._ledger = Ledger.of_epoch(epoch, size())
            self._forget_batch_size()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that all ranks have processed one more batch; call it after each step.

        A rank that was asked to end by SIGTERM or SIGUSR1 does it here.

        Args:
            batch_idx: Horovod's; has no effect, as batches are processed in order.
            batch_size: the number of examples of this rank's batch, or the loader's batch size.
        """
        del batch_idx
        self._batch_size = max(self._batch_size, batch_size)
        # The last batch of another rank, which may be its only one, may have one example more.
        is_last = self._number_of(rank()) <= self._batch_size
        self._step(max(self._batch_size, self._last_batch_size) if is_last else self._batch_size)

    def record_indices(self, indices: Sized) -> None:
        """Records that this rank has processed the next ``len(indices)`` examples, and each other rank as many."""
        self._step(len(indices))

    def _step(self, examples: int) -> None:
        self._ledger = self._ledger.stepped(examples)
        if not global_process_set.communicator.raises_loss:  # in elastic.run, ranks leave when they commit
            leave_if_asked()

    def has_left(self) -> bool:
        """Whether the epoch has examples that no rank has processed; if so, they are sharded over the ranks.

        All ranks must call it together: at the beginning of an epoch, and when all have ended their iterations. The
        epoch ends, with a warning, if no rank has recorded anything since the last call.
        """
        self._joins = True
        communicator, name = global_process_set.communicator, "examples of a sampler"

        def collective() -> Any:  # a rank that is lost in it changes the counts
            counts = (int(self._ledger != self._begun), *self._ledger.counts)
            return communicator.allreduce(np.array(counts), Reduction.MAX, name=name).tolist()

        has_changed, *counts = communicator.atomic(collective)
        self._ledger = self._ledger.counted(counts)
        if self._ledger.is_done(self._length):
            return False
        if not has_changed:
            left = sum(len(part.batches) for part in self._ledger.left_over(self._length))
            warnings.warn(
                f"the epoch ends without {left} of its {len(self.dataset)} examples: ranks have iterated over them, "
                "and recorded none. A DataLoader with drop_last=True has no batch of them; else call record_batch() "
                "after each step.",
                stacklevel=2,
            )
            return False
        self.reset()
        self._begun = self._ledger
        return True

    def reset(self) -> None:
        """Shards what no rank has processed over the ranks that there are now."""
        self._ledger, self._begun = self._ledger.resharded(size(), self._length), None
        self._forget_batch_size()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, as numbers, lists and dicts."""
        return self._ledger.to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()``, maybe of another number of ranks."""
        self._ledger = Ledger.from_json(state_dict)
        self._restored = True
        self.reset()

    def __iter__(self) -> Iterator[int]:
        order, numbers = list(range(len(self.dataset))), self._numbers()
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311
        for part in self._ledger.of_rank(rank()):
            for position in part.closed(self._length).batches:
                yield order[position * part.shards + part.shard]
        # Before it is known, as where a loader's workers read ahead: equal numbers of examples are of equal batches.
        batch_size = self._batch_size or self._last_batch_size or 1
        if not self._joins:
            own, most = numbers[rank()], max(numbers)
            # A loader may have drop_last=True: it has whole batches only.
            if math.ceil(own / batch_size) < math.ceil(most / batch_size) or own // batch_size < most // batch_size:
                yield order[rank() % len(order)]

    def __len__(self) -> int:
        """The number of examples of the rank that has most, so that loaders have the same length on all ranks."""
        return max(self._numbers())

    def _numbers(self) -> list[int]:
        """The number of examples that each rank has."""
        return list(map(self._number_of, range(size())))

    def _number_of(self, each: int) -> int:
        return sum(len(part.closed(self._length).batches) for part in self._ledger.of_rank(each))

    def _forget_batch_size(self) -> None:
        self._last_batch_size = self._batch_size or self._last_batch_size
        self._batch_size = 0

    def _length(self, shard: int, shards: int) -> int:
        return len(range(shard, len(self.dataset), shards))

    def _changed(self, change: Change) -> None:
        self._ledger = self._ledger.lost(change.new_ranks)
