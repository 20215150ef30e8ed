"""The communicator: the collectives of a set of ranks, with one interface for all engines.

The public collectives are written here once: they check that all ranks make the same call (see
``request.py``), bring arrays into the format they are moved in, and hand flat buffers to the engine's
primitives, the abstract methods at the end.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from choros.comm.adasum import adasum
from choros.comm.devices import DeviceCollectives
from choros.comm.fusion import CHUNK_BYTES, Chunk, FusionBuffer, Layout, batches, pack, plan_fusion, regrouped, views
from choros.comm.matching import Offer, matched
from choros.comm.membership import Change
from choros.comm.memory import aligned_empty
from choros.comm.reduction import BFLOAT16, Reduction, check_dtype, from_working, working_dtype, working_op
from choros.comm.request import CollectiveSpec, Request, caller, digest_of, mismatch_text
from choros.comm.selection import select_devices
from choros.comm.signature import Signatures
from choros.comm.waiting import LongWait, Reporter, Schedule
from choros.comm.work import Work, WorkQueue
from choros.errors import ChorosError, ConfigError, EngineError, MismatchError, PeerLostError
from choros.observe import events
from choros.observe.progress import page
from choros.topology import shard_range

__all__ = ["END", "JOINED", "LEAVES", "NEWCOMER", "SHUTDOWN", "Communicator", "MemberLost", "row_counts"]

P = ParamSpec("P")
T = TypeVar("T")
Array = NDArray[Any]
#: A dtype and a shape.
Kind = tuple[np.dtype[np.generic], tuple[int, ...]]

_log = logging.getLogger("choros")

#: The bytes that ranks gather in one message of a group: larger arrays are gathered sooner than they are copied.
GATHERED_TOGETHER = 128 << 10
#: The module of collectives on devices, imported if a rank may use them.
_DEVICES = "choros.comm.engines.device_collectives"
#: When ranks that have asked for different collectives tell each other again what they wait for.
_ROUNDS = Schedule(longest_sleep=10e-3)
#: The notice of a rank which knows that the job was asked to end: all ranks end after this step.
END = 1
#: The notice of rank 0 that a new rank waits for ``admit``.
NEWCOMER = 2
#: The notice of a rank that leaves after this step, in order: it is not replaced.
LEAVES = 4
#: The request of a rank that ends: it matches no other, so ranks that still call a collective are notified.
SHUTDOWN = Request(events.SHUTDOWN.removesuffix("()"))
#: The request of a rank that has joined: it matches every request that this rank can participate in.
JOINED = Request("join")
#: What such a rank knows of the others' request: nothing, nothing but how to learn it, or all.
_UNKNOWN, _LEARNS, _KNOWN = range(3)


class MemberLost(PeerLostError):
    """An elastic engine's primitive has failed, because a member was lost; ``Communicator.atomic`` handles it."""


class Communicator(ABC):
    """A set of ranks that exchange arrays in host memory.

    Every collective must be called by all members: those with a name in any order and from any thread, those without
    one in the same order (see ``matching.py``). Arrays are anything ``numpy.asarray`` takes; results are new NumPy
    arrays. A call that the members do not make identically raises a ``MismatchError`` on all of them before data moves;
    one that is wrong on its own (an unknown dtype, say) raises a ``ConfigError`` on the rank that made it and a
    ``MismatchError`` on the others. After either, the members continue with their next calls.

    Attributes:
        engine: its engine's name, that of a module in ``comm/engines``.
        rank: this process among the members, ``0 … size - 1``.
        size: the number of members.
        ranks: the members' global ranks, ascending.
        launched: the members' ranks as the launcher numbers them; others than ``ranks`` if ``init(comm=…)`` leaves
            some out.
        collectives: the number of collectives in which this process has participated.
        chunk_bytes: arrays are sent in chunks of at most this many bytes.
        bytes_sent: the number of bytes of arrays it has contributed to them, which compression reduces.
        signatures: those of objects that the members exchange, if the engine's connections need them.
        elastic: whether the members go on without those that are lost; see ``atomic``.
        is_new: whether this process is not a rank yet: others have started it, and will take it in (``newcomer.py``).
        on_change: is called whenever the members have changed.
        raises_loss: whether ``atomic`` raises an error after such a change, and does not run the collective again.
        notice: bits, such as ``END``, that an elastic engine tells all other ranks with the agreement at the end of the
            next collective, without a message of their own.
        noticed: the bits that any rank has told with the last one; the same on all ranks.
        last_joined: the members that were the last to ``join``, the last time, as the launcher numbers them; none if
            all did at the same time.
    """

    engine: ClassVar[str]
    elastic = False
    is_new = False
    raises_loss = False
    signatures: Signatures | None = None

    def __init__(self, rank: int, ranks: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.launched = self.ranks
        self.size = len(self.ranks)
        self.collectives = 0
        self.bytes_sent = 0
        self.chunk_bytes = chunk_bytes
        self._queue = WorkQueue()
        self.on_change: Callable[[Change], None] | None = None
        self._when_settled: list[Callable[[], None]] = []
        self.notice = self.noticed = 0
        self.last_joined: tuple[int, ...] = ()
        #: The members that had not joined at the last collective, if others had; as the launcher numbers them.
        self._not_joined: tuple[int, ...] = ()
        #: By the digest of a request, how a rank that has joined takes part.
        self._specs: dict[int, CollectiveSpec] = {}
        self._explanation = b""
        self._over = ""
        self._asked = SHUTDOWN
        self._scratch: NDArray[np.uint8] | None = None

    @property
    def may_have_others(self) -> bool:
        """Whether there are other members, or were, or may be."""
        return self.size > 1 or self.elastic

    # ── collectives ──────────────────────────────────────────────────────────────────────────────

    @final
    def allreduce(
        self, array: ArrayLike, op: Reduction = Reduction.AVERAGE, *, name: str = "", out: Array | None = None
    ) -> Array:
        """Reduces ``array`` over all ranks; every rank gets the result.

        Args:
            array: any shape, including scalars and 0 elements; the same shape and dtype on every rank.
            op: the reduction; Adasum combines whole arrays (``adasum.py``).
            name: by which ranks match it; shown in errors.
            out: the array for the result: contiguous, of the same shape and dtype; may be ``array`` itself. An array
                from ``empty`` is reduced into itself without further copies.

        Returns:
            ``out``, or a new array of the same shape and dtype.

        Raises:
            MismatchError: ranks called it differently.
            ConfigError: the dtype cannot be reduced with ``op``.

        Example:
            >>> from choros.comm.engines.local import LocalCommunicator
            >>> LocalCommunicator().allreduce([1.0, 2.0])
            array([1., 2.])
        """
        source = np.asarray(array)
        if out is None:
            return self._allreduce_all("allreduce", [source], op, name)[0]
        if out is source and (self.size == 1 or self._is_registered(out)):
            request, engine_op = _in_place(out.dtype, out.shape, op, name)
            if request is not None and _problem_of_out(source, out) is None:
                if self.elastic:
                    kept = out.copy()
                    reduce = functools.partial(self._reduce_whole, request, out, engine_op, op)
                    self.atomic(reduce, again=lambda: np.copyto(out, kept))
                else:
                    with self.exclusive():
                        self._reduce_whole(request, out, engine_op, op)
                return out
        return self._allreduce_all("allreduce", [source], op, name, [out])[0]

    @final
    def grouped_allreduce(
        self, arrays: Sequence[ArrayLike], op: Reduction = Reduction.AVERAGE, *, name: str = ""
    ) -> list[Array]:
        """``allreduce`` of several arrays, checked with one control message for all of them."""
        return self._allreduce_all("grouped_allreduce", [np.asarray(array) for array in arrays], op, name)

    @final
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """A new array in the memory that this engine reduces fastest; every rank must call it.

        On the mpi engine ranks of one host share that memory: ``allreduce(array, out=array)`` then needs no copy.
        It is released when the communicator is closed, as by ``shutdown()``; do not touch the array after that.

        Args:
            shape: the same on every rank; values are uninitialised.
            dtype: likewise.

        Example:
            >>> from choros.comm.engines.local import LocalCommunicator
            >>> communicator = LocalCommunicator()
            >>> array = communicator.empty((2, 3))
            >>> array.fill(1)
            >>> float(communicator.allreduce(array, out=array).sum())
            6.0
        """
        dtype = np.dtype(dtype)
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)

        def collective() -> NDArray[np.uint8]:
            self.agree(Request("empty", f"dtype={dtype}, shape={dimensions}"))
            return self._allocate(max(1, math.prod(dimensions) * dtype.itemsize))

        memory = self.atomic(collective)
        return memory[: math.prod(dimensions) * dtype.itemsize].view(dtype).reshape(dimensions)

    @final
    def allgather(self, array: ArrayLike, *, name: str = "") -> Array:
        """Concatenates the ranks' arrays along the first dimension, in the order of the ranks.

        Args:
            array: the first dimension may differ between ranks and may be 0; a scalar counts as one row.
            name: shown in errors.

        Returns:
            An array whose first dimension is the sum of the ranks' first dimensions.
        """
        rows = np.atleast_1d(np.asarray(array))
        request = _rows_request("allgather", ((rows.dtype, rows.shape[1:]),), name)
        return self.atomic(
            lambda: self._gather_rows(rows, self.agree(request, value=len(rows), problem=_problem(rows.dtype)))
        )

    @final
    def grouped_allgather(self, arrays: Sequence[ArrayLike], *, name: str = "") -> list[Array]:
        """``allgather`` of several arrays in few messages: small ones are sent together.

        Args:
            arrays: of the same dtypes and inner shapes on every rank; the number of rows may differ for each of them.
            name: shown in errors.

        Example:
            >>> from choros.comm.engines.local import LocalCommunicator
            >>> LocalCommunicator().grouped_allgather([[1.5], [2, 3]])
            [array([1.5]), array([2, 3])]
        """
        parts = [np.atleast_1d(np.asarray(array)) for array in arrays]
        request = _rows_request("grouped_allgather", tuple([(rows.dtype, rows.shape[1:]) for rows in parts]), name)
        problems = [problem for dtype in {rows.dtype for rows in parts} if (problem := _problem(dtype))]
        lengths = np.array([len(rows) for rows in parts], np.int64)

        def collective() -> list[Array]:
            values = self.agree(request, value=digest_of(lengths.tobytes()), problem=next(iter(problems), None))
            return self._gather_all(parts, lengths, values)

        return self.atomic(collective)

    @final
    def broadcast(self, array: ArrayLike, root: int = 0, *, name: str = "") -> Array:
        """Sends the array of the member ``root`` to every rank.

        Args:
            array: the same shape and dtype on every rank; only the root's values matter.
            root: a rank of this communicator.
            name: shown in errors.
        """
        source = np.asarray(array)
        problem = _problem(source.dtype)
        if not 0 <= root < self.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self.size} ranks 0 … {self.size - 1}.")
        sender = self.launched[root] if problem is None else None

        def collective() -> Array:
            rank = root if sender is None else self.first_left([sender], "the sender of a broadcast")
            self.agree(_broadcast_request(rank, source.dtype, source.shape, name), problem=problem)
            return self._broadcast_from(rank, source)

        return self.atomic(collective)

    @final
    def reducescatter(self, array: ArrayLike, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> Array:
        """Reduces ``array`` over all ranks and returns this rank's rows of the result.

        Rows are distributed as by ``shard_range``: the first ranks get the remainder.

        Args:
            array: at least one dimension; the same shape and dtype on every rank.
            op: the reduction.
            name: shown in errors.
        """
        return self._scatter_all("reducescatter", [np.asarray(array)], op, name)[0]

    @final
    def grouped_reducescatter(
        self, arrays: Sequence[ArrayLike], op: Reduction = Reduction.AVERAGE, *, name: str = ""
    ) -> list[Array]:
        """``reducescatter`` of several arrays in few messages: small ones of one dtype are sent together."""
        return self._scatter_all("grouped_reducescatter", [np.asarray(array) for array in arrays], op, name)

    @final
    def alltoall(
        self, array: ArrayLike, splits: ArrayLike | None = None, *, name: str = ""
    ) -> tuple[Array, NDArray[np.int32]]:
        """Sends rows of ``array`` to every rank and gathers the rows sent to this one.

        Args:
            array: the first dimension may differ between ranks.
            splits: the number of rows for each rank, in order; ``None``: equally many.
            name: shown in errors.

        Returns:
            The rows received, in the order of the senders, and the number of rows from each.
        """
        rows = np.asarray(array)
        request = _rows_request("alltoall", ((rows.dtype, rows.shape[1:]),), name)
        members = self.launched

        def collective() -> tuple[Array, NDArray[np.int32]]:
            if splits is not None and self.launched != members:
                raise PeerLostError("alltoall: splits gives rows to a rank that was lost.")
            counts, problem = row_counts(rows.shape, splits, self.size)
            self.agree(request, problem=problem or _problem(rows.dtype))
            return self._exchange_rows(rows, counts)

        return self.atomic(collective)

    @final
    def barrier(self, *, name: str = "") -> None:
        """Returns when every rank has called it."""
        self.atomic(lambda: self.agree(_barrier_request(name)))

    @final
    def start(self, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Starts a collective without a name and returns at once; ``Work.wait`` returns its result.

        Arrays must not be changed until then. Such collectives run in the order in which they were started.

        Example:
            >>> from choros.comm.engines.local import LocalCommunicator
            >>> communicator = LocalCommunicator()
            >>> work = communicator.start(communicator.allreduce, [1.0, 2.0], Reduction.SUM)
            >>> work.wait()
            array([1., 2.])
        """
        return self._queue.submit(collective, *args, **kwargs)

    @final
    def start_named(self, name: str, collective: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """``start`` of a collective by whose name ranks match it: they may start such ones in different orders.

        Args:
            name: the same on all ranks.
            collective: what runs on another thread: one collective, or some in a row.
            *args: its arguments.
            **kwargs: likewise.

        Raises:
            ConfigError: a collective of this name is under way on this rank.
        """
        return self._queue.submit_named(name, collective, *args, **kwargs)

    @final
    def split(self, ranks: Sequence[int]) -> Self | None:
        """A communicator of some members only; every member must call it.

        Args:
            ranks: ranks of this communicator, in any order.

        Returns:
            The new communicator, in which members are numbered by ascending rank; ``None`` on ranks that
            are not in it.
        """
        chosen = sorted(set(ranks))
        problem = None
        if len(chosen) != len(ranks) or not chosen or not set(chosen) <= set(range(self.size)):
            problem = ConfigError(f"ranks {list(ranks)} are not distinct ranks of 0 … {self.size - 1}.")

        def split() -> Any:
            self.agree(Request("split", f"ranks={chosen}"), problem=problem)
            members = self._split(chosen)
            if members is not None:
                members.launched = tuple(self.launched[rank] for rank in chosen)
                members.chunk_bytes = self.chunk_bytes
            return members

        own: Self | None = self.atomic(split)
        return own

    @functools.cached_property
    def devices(self) -> DeviceCollectives | None:
        """Collectives on device tensors; ``None`` if tensors must be copied to the host.

        The connections are made by the first collective, which all members call.
        """
        if self.elastic:
            return None  # a library of devices cannot go on without a rank
        choice = select_devices(self.engine, self.size, os.environ)
        if self.rank == 0:
            _log.info("tensors on devices: %s.", choice.reason)
        if choice.module is None:
            return None
        collectives: DeviceCollectives = importlib.import_module(_DEVICES).chosen(self, choice)
        return collectives

    @final
    def close(self) -> None:
        """Releases the communicator's resources; all members must call it, and no method may be called after it."""
        if "devices" in self.__dict__ and self.devices is not None:
            self.devices.close()
        self._queue.close()
        self._close()

    def abandon(self) -> None:  # noqa: B027  (most engines' connections end with the process)
        """Releases what a rank can release alone, once another has ended; no method may be called after it."""

    @final
    def only(self, ranks: Sequence[int]) -> Self:
        """``split`` in place of this communicator, which is closed; its members become all ranks of the job.

        Raises:
            ConfigError: this rank is not among them.
        """
        members = self.split(ranks)
        self.close()
        if members is None:
            raise ConfigError(f"init(comm={list(ranks)}) was called on rank {self.rank}, which is not in the list.")
        members.ranks = tuple(range(members.size))
        return members

    # ── building blocks ──────────────────────────────────────────────────────────────────────────

    @final
    def exclusive(self) -> AbstractContextManager[None]:
        """A context in which no other collective of this communicator runs; see ``WorkQueue.exclusive``."""
        return self._queue.exclusive()

    @final
    def atomic(self, collective: Callable[[], T], *, again: Callable[[], None] | None = None) -> T:
        """Runs ``collective``, which calls ``agree`` and then moves data, on all members or on none.

        On an elastic engine, if a member is lost meanwhile, none of the others completes it: they become the members,
        and run it again, with what they give to it. So it must not change its input, and it must read ``rank``,
        ``size`` and the reducer's plans itself::

                       rank 0                rank 1                rank 2                 rank 1 of 2
            agree      all are here          all are here          all are here
            data       received              killed                PeerLostError
            settle     no: one was lost ◄──────────────────────►   no: one was lost       the same answer on all
            recover    shrinks                                     shrinks; is rank 1 now
            again      agree, data, settle: yes ◄──────────────►   agree, data, settle: yes

        A call inside another one is a part of that.

        Args:
            collective: see above.
            again: called before ``collective`` is run again; it may call other collectives.

        Raises:
            PeerLostError: a member was lost, and this engine is not elastic, too few members are left, or the caller
                has asked for the error (``raises_loss``).
        """
        with self._queue.exclusive():
            if not self.elastic or self._queue.in_unit:
                return collective()
            while True:
                with self._queue.unit():
                    results = self._attempt(collective)
                if results:
                    return results[0]
                if again is not None:
                    again()

    def _attempt(self, collective: Callable[[], T]) -> tuple[T, ...]:
        """Runs a collective; returns its result, or nothing if a member was lost, without which all others go on."""
        error: ChorosError | None = None
        try:
            result = collective()
        except ChorosError as raised:
            error = raised
        settled = self._settle(completed=not isinstance(error, MemberLost))
        actions, self._when_settled = self._when_settled, []
        if settled:
            for action in actions:
                action()
            if error is not None:
                raise error
            return (result,)
        self._queue.abandon_plan()
        before, too_few = self.launched, None
        try:
            self._recover()
        except PeerLostError as raised:
            if self.launched == before:
                raise
            too_few = raised
        self._queue.end_turn()
        self._scratch = None
        change = Change.between(before, self.launched, ends_job=too_few is not None)
        if self.on_change is not None:
            self.on_change(change)
        if too_few is not None:
            raise too_few
        if self.raises_loss:
            raise PeerLostError(f"{self._asked}: {change}.", ranks=change.lost)
        return ()

    @final
    def when_settled(self, action: Callable[[], None]) -> None:
        """Calls ``action`` once the ``atomic`` collective that the caller is in has ended on all ranks; else at once.

        It is not called if the collective is run again because a member was lost.
        """
        if self.elastic and self._queue.in_unit:
            self._when_settled.append(action)
        else:
            action()

    def opening(self) -> AbstractContextManager[None]:
        """A part of the program in which new ranks take the places of lost ones, whenever all ranks call ``admit``.

        All ranks enter it at the same place; so does a new one, in its own process.
        """
        return nullcontext()

    @final
    def admit(self) -> bool:
        """Makes the process that waits a member, the last one; all members call it, between two collectives.

        Returns:
            Whether it is a member; it may have been lost meanwhile.
        """
        with self._queue.exclusive():
            before, self.noticed = self.launched, 0
            if not self._admit():
                return False
            self._scratch = None
            if self.on_change is not None:
                self.on_change(Change.between(before, self.launched))
            return True

    @final
    def first_left(self, launched: Sequence[int], what: str) -> int:
        """The present rank of the first of these members, numbered as the launcher does, that was not lost.

        Args:
            launched: one or more.
            what: they are, for the error.

        Raises:
            PeerLostError: all were.
        """
        left = next((each for each in launched if each in self.launched), None)
        if left is None:
            raise PeerLostError(
                f"{what}, rank {launched[0]} at the start of the job, was lost, and no other rank has its values: "
                "start the job again, from its last commit. A function of hvd.elastic.run goes on by itself."
            )
        return self.launched.index(left)

    @final
    def agree(self, request: Request, *, value: int = 0, problem: Exception | None = None) -> list[int]:
        """The check before data moves: one control message.

        Args:
            request: this rank's request.
            value: a number that every rank gets, such as the rows of this one.
            problem: the error in this rank's call. It is raised here; other ranks, which cannot continue
                without this one, get a ``MismatchError`` instead of a hang.

        Returns:
            The ranks' values.
        """
        if problem is not None:
            request = Request(request.collective, f"refused: {problem}", request.name)
        gathered = self._gather(request, value)
        for digest, _ in gathered:
            if digest != request.digest:
                break
        else:
            if problem is not None:
                raise problem
            self._not_joined = ()
            return [value for _, value in gathered]
        if self._joined_ranks_take_part(request, gathered):
            self._check_root(request, gathered)
            return _values(gathered)
        mismatch = self._mismatch(request, gathered)
        raise problem or mismatch

    @final
    def join(
        self,
        requests: Callable[[], Sequence[Request]],
        take_part: Callable[[Request, list[int]], None],
        learn: Callable[[bytes], Sequence[Request]] | None = None,
    ) -> None:
        """Participates in whatever the other ranks request, without data, until all ranks have joined.

        ::

            rank 0                 rank 1                 rank 2, which has joined
            agree(a, value=8)      agree(a, value=3)      take_part(a, [8, 3, 0])          it does its part of a
            allgather(rows)        allgather(rows)                                         gives no rows, by itself
            agree(b, value=8)      take_part(b, [8, 0, 0])  take_part(b, [8, 0, 0])        both do their part of b
            join                   join                   join                             all have joined

        The collectives of this class need not be in ``requests``: this rank gives zeros, or no rows, to them. What it
        does not know, the first rank that has not joined sends it once; so it does with a request that has ``explain``,
        if this rank can ``learn`` it. Then ``last_joined`` is set.

        Args:
            requests: returns the others in which this rank can participate.
            take_part: does this rank's part of one of them, after its control message; it is given the ranks' values,
                0 for ranks that have joined.
            learn: returns those that such a message explains.

        Raises:
            MismatchError: on all ranks, if the others' request is neither one of ``requests`` nor such a collective.
        """
        while not self.atomic(functools.partial(self._join_once, requests, take_part, learn)):
            pass
        self.last_joined, self._not_joined = self._not_joined, ()

    def _join_once(
        self,
        requests: Callable[[], Sequence[Request]],
        take_part: Callable[[Request, list[int]], None],
        learn: Callable[[bytes], Sequence[Request]] | None,
    ) -> bool:
        """Participates in one collective; returns whether all ranks have joined."""
        gathered = self._gather(JOINED, 0)
        digests = {digest for digest, _ in gathered if digest != JOINED.digest}
        if not digests:
            return True
        if len(digests) > 1 and SHUTDOWN.digest not in digests:
            self._compare(JOINED)  # the others' calls differ; they report it
            return False
        (digest, *_) = digests
        request = next((request for request in requests() if request.digest == digest), None)
        knows = _KNOWN if request is not None or digest in self._specs else _LEARNS if learn else _UNKNOWN
        if not self._joined_ranks_take_part(JOINED, gathered, knows=knows):
            raise self._mismatch(JOINED, gathered)
        if request is None and digest not in self._specs and learn is not None:
            learned = learn(self._explanation)
            request = next((request for request in learned if request.digest == digest), None)
            if request is None:
                raise EngineError(
                    "this rank has joined, and cannot do what the others do next: it has another device, or other "
                    f"settings of CHOROS_…. It would do: {'; '.join(map(str, learned))}."
                )
        if request is not None:
            take_part(request, _values(gathered))
            return False
        spec = self._specs[digest]
        if spec.root is None or gathered[spec.root][0] != JOINED.digest:
            self._take_part(spec, _values(gathered))
        return False

    @final
    def reduce_in_place(self, buffer: Array, op: Reduction) -> None:
        """Reduces a flat, contiguous buffer in place, unchecked: call it inside ``exclusive()`` after ``agree``.

        Args:
            buffer: of a dtype engines reduce themselves: not bool, not bfloat16.
            op: any reduction except ``AVERAGE``.
        """
        self.bytes_sent += buffer.nbytes
        self._allreduce(buffer, op)

    @final
    def reduce_chunks(
        self,
        buffer: FusionBuffer,
        op: Reduction,
        fill: Callable[[Chunk, Array], None],
        empty: Callable[[Array, Chunk], None],
    ) -> None:
        """Reduces a fusion buffer chunk by chunk, in memory that is fast to reduce.

        Unchecked: call it inside ``exclusive()`` after ``agree``.

        Args:
            buffer: planned with this communicator's ``chunk_bytes``; the same on every rank.
            op: any reduction except ``AVERAGE``.
            fill: writes a chunk to the given message.
            empty: reads its result from the given message.
        """
        for chunk in buffer.chunks:
            message = self._stage()[: (chunk.stop - chunk.start) * buffer.wire.itemsize].view(buffer.wire)
            fill(chunk, message)
            self.reduce_in_place(message, op)
            empty(message, chunk)

    @final
    def gather_bytes(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        """Concatenates the ranks' bytes, unchecked: call it inside ``exclusive()`` after ``agree``.

        Args:
            send: this rank's.
            counts: the number of bytes that each rank contributes.
        """
        self.bytes_sent += send.nbytes
        return self._allgather(send, counts)

    @final
    def alltoallv_bytes(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Sends ``send_counts[i]`` bytes to rank ``i`` and concatenates ``receive_counts[i]`` from each.

        Unchecked: call it inside ``exclusive()`` after ``agree``.
        """
        self.bytes_sent += send.nbytes
        return self._alltoall(send, send_counts, receive_counts)

    def _allreduce_all(
        self, collective: str, arrays: list[Array], op: Reduction, name: str, outs: list[Array] | None = None
    ) -> list[Array]:
        kinds = tuple([(array.dtype, array.shape) for array in arrays])
        request = _request(collective, op, kinds, name)
        problems = [problem for dtype in {dtype for dtype, _ in kinds} if (problem := _problem(dtype, op, whole=True))]
        problems += [problem for pair in zip(arrays, outs or (), strict=False) if (problem := _problem_of_out(*pair))]

        def reduce() -> list[Array]:
            self.agree(request, problem=next(iter(problems), None))
            return self._reduce_all(kinds, arrays, op, None if self.elastic else outs)

        results = self.atomic(reduce)
        if outs is None or not self.elastic:
            return results
        for out, result in zip(outs, results, strict=True):  # only now: ``out`` may be the array itself
            np.copyto(out, result)
        return outs

    def _scatter_all(self, collective: str, arrays: list[Array], op: Reduction, name: str) -> list[Array]:
        kinds = tuple([(array.dtype, array.shape) for array in arrays])
        request = _request(collective, op, kinds, name)
        problems = [problem for dtype in {dtype for dtype, _ in kinds} if (problem := _problem(dtype, op))]
        if any(not shape for _, shape in kinds):
            problems.append(
                ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")
            )

        def reduce_and_scatter() -> list[Array]:
            self.agree(request, problem=next(iter(problems), None))
            return self._reduce_and_scatter(arrays, op)

        return self.atomic(reduce_and_scatter)

    def _reduce_whole(self, request: Request, out: Array, engine_op: Reduction, op: Reduction) -> None:
        """Reduces an array in place, without copies."""
        self.agree(request)
        flat = out.reshape(-1)
        self.reduce_in_place(flat, engine_op)
        if op is Reduction.AVERAGE:
            from_working(flat, flat, op, self.size)

    # ── the collectives' data, once all ranks have agreed ────────────────────────────────────────

    def _take_part(self, spec: CollectiveSpec, values: Sequence[int]) -> None:
        """Does the part of a rank that has joined: with zeros, or without rows."""
        kinds = tuple((_dtype(name), shape) for name, shape in spec.arrays)
        match spec.collective:
            case "allreduce" | "grouped_allreduce":
                zeros = [np.zeros(shape, dtype) for dtype, shape in kinds]
                self._reduce_all(kinds, zeros, Reduction(spec.op), None)
            case "reducescatter" | "grouped_reducescatter":
                self._reduce_and_scatter([np.zeros(shape, dtype) for dtype, shape in kinds], Reduction(spec.op))
            case "broadcast":
                ((dtype, shape),) = kinds
                self._broadcast_from(spec.root or 0, np.zeros(shape, dtype))
            case "allgather":
                ((dtype, inner),) = kinds
                self._gather_rows(np.zeros((0, *inner), dtype), values)
            case "grouped_allgather":
                empty = [np.zeros((0, *inner), dtype) for dtype, inner in kinds]
                self._gather_all(empty, np.zeros(len(empty), np.int64), values)
            case "alltoall":
                ((dtype, inner),) = kinds
                self._exchange_rows(np.zeros((0, *inner), dtype), np.zeros(self.size, np.int64))

    def _reduce_all(
        self, kinds: tuple[Kind, ...], arrays: list[Array], op: Reduction, outs: list[Array] | None
    ) -> list[Array]:
        if op is Reduction.ADASUM:
            combined = adasum(self, arrays)
            for out, array in zip(outs or (), combined, strict=False):
                np.copyto(out, array)
            return outs or combined
        flats = [_flat(array) for array in arrays]
        results = list(outs or arrays)
        layout, buffers = _plan(kinds, self.chunk_bytes)
        for buffer in buffers:
            flat = aligned_empty((buffer.size,), buffer.dtype) if outs is None else outs[0].reshape(-1)

            def fill(chunk: Chunk, message: Array) -> None:
                pack(chunk, flats, message)

            def empty(message: Array, chunk: Chunk, flat: Array = flat) -> None:
                from_working(message, flat[chunk.start : chunk.stop], op, self.size)

            self.reduce_chunks(buffer, working_op(buffer.dtype, op), fill, empty)
            if outs is None:
                views(buffer, flat, layout, results)
        return results

    def _gather_rows(self, rows: Array, lengths: Sequence[int]) -> Array:
        row_bytes = _row_bytes(rows)
        received = self.gather_bytes(_bytes(rows), [length * row_bytes for length in lengths])
        return received.view(rows.dtype).reshape(sum(lengths), *rows.shape[1:])

    def _gather_all(self, parts: list[Array], lengths: NDArray[np.int64], digests: Sequence[int]) -> list[Array]:
        """Gathers several arrays; ``digests`` are those of the ranks' ``lengths``."""
        if len(set(digests)) == 1:
            table = np.tile(lengths, (self.size, 1))
        else:
            received = self._allgather(lengths.view(np.uint8), [lengths.nbytes] * self.size)
            table = received.view(np.int64).reshape(self.size, len(parts))
        row_bytes = np.array([_row_bytes(rows) for rows in parts], np.int64)
        totals, results = table.sum(0), []
        for batch in batches((totals * row_bytes).tolist(), min(GATHERED_TOGETHER, self.chunk_bytes)):
            counts = table[:, batch] * row_bytes[batch]
            message = [_bytes(rows) for rows in parts[batch]]
            received = self.gather_bytes(
                message[0] if len(message) == 1 else np.concatenate(message), counts.sum(1).tolist()
            )
            results += regrouped(received, counts)
        return [
            result.view(rows.dtype).reshape(total, *rows.shape[1:])
            for result, rows, total in zip(results, parts, totals.tolist(), strict=True)
        ]

    def _broadcast_from(self, root: int, source: Array) -> Array:
        buffer = source.flatten()
        self.bytes_sent += buffer.nbytes if root == self.rank else 0
        self._broadcast(buffer.view(np.uint8), root)
        return buffer.reshape(source.shape)

    def _reduce_and_scatter(self, arrays: list[Array], op: Reduction) -> list[Array]:
        results = list(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            same = [index for index, array in enumerate(arrays) if array.dtype == dtype]
            for batch in batches([arrays[index].nbytes for index in same], self.chunk_bytes):
                own = self._scatter_together([arrays[index] for index in same[batch]], op)
                for index, array in zip(same[batch], own, strict=True):
                    results[index] = array
        return results

    def _scatter_together(self, arrays: list[Array], op: Reduction) -> list[Array]:
        """Reduces arrays of one dtype in one message, in which their rows for one rank follow each other."""
        dtype, size = arrays[0].dtype, self.size
        shares = [[array[slice(*shard_range(len(array), rank, size))] for array in arrays] for rank in range(size)]
        counts = [sum(rows.size for rows in share) for share in shares]
        working = np.empty(sum(counts), working_dtype(dtype))
        np.concatenate([_flat(rows) for share in shares for rows in share], out=working, casting="unsafe")
        self.bytes_sent += working.nbytes
        working = self._reducescatter(working, counts, working_op(dtype, op))
        results, start = [], 0
        for rows in shares[self.rank]:
            result = np.empty(rows.shape, dtype)
            from_working(working[start : start + rows.size], result.reshape(-1), op, size)
            start += rows.size
            results.append(result)
        return results

    def _exchange_rows(self, rows: Array, counts: NDArray[np.int64]) -> tuple[Array, NDArray[np.int32]]:
        eights = [counts.itemsize] * self.size
        received_counts = self._alltoall(counts.view(np.uint8), eights, eights).view(np.int64)
        row_bytes = _row_bytes(rows)
        received = self.alltoallv_bytes(
            _bytes(rows),
            [int(count) * row_bytes for count in counts],
            [int(count) * row_bytes for count in received_counts],
        )
        shape = (int(received_counts.sum()), *rows.shape[1:])
        return received.view(rows.dtype).reshape(shape), received_counts.astype(np.int32)

    def _stage(self) -> NDArray[np.uint8]:
        """The memory in which chunks are packed; allocated once, and again if chunks become larger."""
        if self._scratch is None or self._scratch.nbytes < self.chunk_bytes:
            self._scratch = self._allocate(self.chunk_bytes)
        return self._scratch

    # ── control messages ─────────────────────────────────────────────────────────────────────────

    def _gather(self, request: Request, value: int) -> list[list[int]]:
        """The control message, when it is this request's turn: returns every rank's digest and value."""
        name = None if request is JOINED else request.name
        header = np.array((request.digest, value), np.int64)

        def take_turn() -> list[list[int]]:
            return self._queue.take_turn(name, self._propose, self._make_plan, request, header)

        try:
            observed = events.active()
            gathered = self._observed(request, take_turn) if observed else take_turn()
        except ChorosError:
            raise
        except BaseException:
            self._break_off(request)
            raise
        self.collectives += 1
        page.begin_collective(request.label, self.size)
        if not observed:
            self._queue.on_exit(page.end_collective)
        return gathered

    def _propose(self, request: Request, header: NDArray[np.int64]) -> tuple[list[list[int]], bool]:
        """The control message, and whether it settles which collective is next: see ``WorkQueue.take_turn``."""
        # Plain integers: this runs in every step, and for some ranks they are compared faster than arrays.
        gathered: list[list[int]] = self._control_message(request, header).tolist()
        for digest, _ in gathered:
            if digest != request.digest:
                break
        else:
            return gathered, True
        digests = {digest for digest, _ in gathered}
        return gathered, SHUTDOWN.digest in digests or (JOINED.digest in digests and len(digests) == 2)

    def _observed(self, request: Request, take_turn: Callable[[], T]) -> T:
        """``take_turn``, with events before and after it, and one when the collective is done."""
        name, sent, begun = request.name or request.collective, self.bytes_sent, time.perf_counter()

        def emit(kind: events.Kind, **details: events.Detail) -> None:
            events.emit(kind, name, collective=request.collective, process_set=self.ranks, **details)

        def done() -> None:
            page.end_collective()
            seconds = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_DONE, bytes=self.bytes_sent - sent, seconds=seconds)

        self._queue.on_exit(done)
        emit(events.Kind.COLLECTIVE_BEGUN)
        result = take_turn()
        waited = round(time.perf_counter() - begun, 6)
        emit(events.Kind.COLLECTIVE_MATCHED, number=self.collectives, waited=waited)
        return result

    def _make_plan(self, request: Request, _: NDArray[np.int64]) -> None:
        """Agrees with the other ranks on which collectives are next; see ``matching.py``."""
        table: NDArray[np.int64] | None = None
        with Reporter(self._long_wait) as reporter:
            while True:
                message = self._queue.offer().encode()
                header = np.array((digest_of(message), len(message)), np.int64)
                earlier, table = table, self._control_message(request, header).copy()
                if earlier is None or (table != earlier).any():
                    offers = [Offer.decode(each) for each in self._share(message, table[:, 1].tolist())]
                    self._queue.plan.extend(matched(offers))
                    if self._queue.plan:
                        return
                    if all(offer.complete for offer in offers):
                        raise MismatchError(self._compare(request))
                self._queue.pause(_ROUNDS.sleep_after(reporter.check()))

    def _joined_ranks_take_part(self, request: Request, gathered: list[list[int]], *, knows: int = _KNOWN) -> bool:
        """Whether ranks have joined, and can participate in the one request that all others made; all ranks ask this.

        Only a joined rank knows whether it knows the request, so this takes another control message. If one does not,
        the first rank that has not joined sends it: as a spec, or as an explanation, whose length is sent as a negative
        number, and which is signed if connections need it.
        """
        digests = {digest for digest, _ in gathered}
        if JOINED.digest not in digests or len(digests) > 2:
            return False
        not_joined = tuple(
            member for member, (digest, _) in zip(self.launched, gathered, strict=True) if digest != JOINED.digest
        )
        self.when_settled(lambda: setattr(self, "_not_joined", not_joined))
        message, sign = b"" if request.spec is None else request.spec.encode(), 1
        if request.explain is not None:
            message, sign = request.explain(), -1
            if self.signatures is not None:
                message = self.signatures.sign(message, collective=self.collectives, rank=self.rank)
        table = self._control_message(request, np.array((knows, sign * len(message)), np.int64)).tolist()
        if all(knows == _KNOWN for knows, _ in table):
            return True
        sender = next(rank for rank, (digest, _) in enumerate(gathered) if digest != JOINED.digest)
        length = table[sender][1]
        if length == 0 or (length < 0 and any(knows == _UNKNOWN for knows, _ in table)):
            return False
        lengths = [abs(length) if rank == sender else 0 for rank in range(self.size)]
        shared = self._share(message if self.rank == sender else b"", lengths)[sender]
        if length > 0:
            self._specs[gathered[sender][0]] = CollectiveSpec.decode(shared)
        elif self.signatures is None:
            self._explanation = shared
        else:
            self._explanation = self.signatures.verified(shared, collective=self.collectives, rank=sender)
        return True

    def _check_root(self, request: Request, gathered: list[list[int]]) -> None:
        root = None if request.spec is None else request.spec.root
        if root is not None and gathered[root][0] == JOINED.digest:
            raise MismatchError(
                f"{request}: rank {self.ranks[root]}, which would send, has joined, and has no values any more."
            )

    def _control_message(self, request: Request, header: NDArray[np.int64]) -> NDArray[np.int64]:
        """Gathers the ranks' headers, once all ranks are here."""
        if self._over:
            raise MismatchError(self._over)
        self._asked = request
        try:
            return self._exchange(header)
        except EngineError:
            raise
        except BaseException:
            self._break_off(request)
            raise

    def _break_off(self, request: Request) -> None:
        """After Ctrl-C, or a signal's handler."""
        # The other ranks consider this request made, and would wait for its data.
        self._over = f"{request} was interrupted on this rank, which cannot communicate any more."
        self._queue.abandon_plan()

    def _share(self, message: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Every rank's message."""
        together = self._allgather(np.frombuffer(message, np.uint8), lengths).tobytes()
        ends = np.cumsum(lengths)
        return [together[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _mismatch(self, request: Request, gathered: list[list[int]]) -> MismatchError:
        """The error that compares the ranks' requests."""
        comparison = self._compare(request)
        if any(digest == SHUTDOWN.digest for digest, _ in gathered):
            # A rank has left: to wait for it again would take forever.
            self._over = comparison
        return MismatchError(comparison)

    def _long_wait(self) -> LongWait:
        """The wait for the other members in the current collective."""
        return LongWait(str(self._asked), self.launched)

    def _compare(self, request: Request) -> str:
        location = caller() or ("" if request == SHUTDOWN else "unknown location")
        text = f"{request} at {location}" if location else str(request)
        mine = text.encode()
        lengths = self._exchange(np.array([len(mine), 0], np.int64))[:, 0].tolist()
        texts = [each.decode() for each in self._share(mine, lengths)]
        return mismatch_text(texts, self.ranks)

    # ── the engine's primitives ────────────────────────────────────────────────────────────────

    def _settle(self, *, completed: bool) -> bool:
        """Whether all members have completed the collective: the same answer on all of them."""
        return completed

    def _recover(self) -> None:
        """Makes those that are left the members: sets ``rank``, ``size``, ``ranks`` and ``launched``.

        Raises:
            PeerLostError: too few are left.
        """
        raise NotImplementedError

    def _admit(self) -> bool:
        """Makes the process that waits a member: sets what ``_recover`` sets. Returns whether it is one."""
        return False

    def hosts(self) -> list[str]:
        """The name of every rank's host, or of a rank on it."""
        return ["localhost"] * self.size

    @abstractmethod
    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        """The one control message: gathers every rank's two integers; shape ``(size, 2)``; valid until the next one."""

    @abstractmethod
    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        """Reduces the flat ``buffer`` in place with SUM, MIN, MAX or PRODUCT."""

    @abstractmethod
    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        """Concatenates the ranks' bytes, ``counts[i]`` from rank ``i``."""

    @abstractmethod
    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Overwrites ``buffer`` with the root's."""

    @abstractmethod
    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        """Reduces ``buffer`` and returns this rank's part, ``counts[i]`` items for rank ``i``."""

    @abstractmethod
    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Sends ``send_counts[i]`` bytes to rank ``i`` and concatenates ``receive_counts[i]`` from each."""

    def _allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes that ``_allreduce`` is fast on; called by all members."""
        return aligned_empty((nbytes,), np.dtype(np.uint8))

    def _is_registered(self, buffer: Array) -> bool:
        """Whether ``buffer`` is in memory from ``_allocate`` that ``_allreduce`` treats in another way."""
        del buffer
        return False

    @abstractmethod
    def _split(self, ranks: Sequence[int]) -> Self | None:
        """The communicator of the members ``ranks``; called by all members."""

    @abstractmethod
    def _close(self) -> None:
        """Releases the engine's resources; called by all members."""


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _flat(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat.view(np.uint8) if flat.dtype == np.bool_ else flat


@functools.lru_cache(maxsize=256)
def _plan(kinds: tuple[Kind, ...], chunk_bytes: int) -> tuple[Layout, tuple[FusionBuffer, ...]]:
    """Cached, as are requests. Arrays of one dtype are sent together."""
    layout = tuple((shape, dtype) for dtype, shape in kinds)
    return layout, plan_fusion(layout, [range(len(layout))], working_dtype, chunk_bytes)


@functools.lru_cache(maxsize=256)
def _request(collective: str, op: Reduction, kinds: tuple[Kind, ...], name: str) -> Request:
    """Cached, as most requests are made every step; so is their digest."""
    each = "; ".join(f"dtype={dtype}, shape={shape}" for dtype, shape in kinds)
    spec = None
    if collective != "allreduce in place":  # its memory is the callers'
        spec = CollectiveSpec(collective, tuple((dtype.name, shape) for dtype, shape in kinds), op.value)
    return Request(collective, f"op={op.value}, {each}", name, spec)


@functools.lru_cache(maxsize=256)
def _in_place(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], op: Reduction, name: str
) -> tuple[Request | None, Reduction]:
    """The request of an allreduce in place, and the engine's operation; ``None`` if engines do not reduce it so."""
    direct = op is not Reduction.ADASUM and _problem(dtype, op) is None and working_dtype(dtype) == dtype
    return (
        (_request("allreduce in place", op, ((dtype, shape),), name), working_op(dtype, op)) if direct else (None, op)
    )


@functools.lru_cache(maxsize=256)
def _rows_request(collective: str, kinds: tuple[Kind, ...], name: str) -> Request:
    """``kinds`` are the arrays' dtypes and shapes without the number of rows."""
    each = "; ".join(f"dtype={dtype}, shape=(any, {', '.join(map(str, inner))})" for dtype, inner in kinds)
    spec = CollectiveSpec(collective, tuple((dtype.name, inner) for dtype, inner in kinds))
    return Request(collective, each, name, spec)


@functools.lru_cache(maxsize=256)
def _broadcast_request(root: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str) -> Request:
    spec = CollectiveSpec("broadcast", ((dtype.name, shape),), root=root)
    return Request("broadcast", f"root={root}, dtype={dtype}, shape={shape}", name, spec)


@functools.lru_cache(maxsize=256)
def _barrier_request(name: str) -> Request:
    return Request("barrier", name=name, spec=CollectiveSpec("barrier"))


def _problem_of_out(array: Array, out: Array) -> ConfigError | None:
    if (out.shape, out.dtype) == (array.shape, array.dtype) and out.flags.c_contiguous and out.flags.writeable:
        return None
    return ConfigError(f"out must be a writable, contiguous array of dtype {array.dtype} and shape {array.shape}.")


def _values(gathered: list[list[int]]) -> list[int]:
    """The values of the ranks that have not joined, 0 for the others."""
    return [0 if digest == JOINED.digest else value for digest, value in gathered]


def _row_bytes(rows: Array) -> int:
    return rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))


def _dtype(name: str) -> np.dtype[np.generic]:
    return BFLOAT16 if name == BFLOAT16.name else np.dtype(name)


def _problem(dtype: np.dtype[np.generic], op: Reduction | None = None, *, whole: bool = False) -> ConfigError | None:
    try:
        check_dtype(dtype, op, whole=whole)
    except ConfigError as error:
        return error
    return None


def row_counts(
    shape: Sequence[int], splits: ArrayLike | None, size: int
) -> tuple[NDArray[np.int64], ConfigError | None]:
    """The number of rows that an alltoall of an array of ``shape`` sends to each of ``size`` ranks, or the error."""
    nothing = np.zeros(size, np.int64)
    if not shape:
        return nothing, ConfigError("alltoall: a scalar has no rows to send; give it at least one dimension.")
    if splits is None:
        if shape[0] % size:
            return nothing, ConfigError(
                f"alltoall: {shape[0]} rows cannot be split equally over {size} ranks; give the number for "
                "each with splits=[…]."
            )
        return np.full(size, shape[0] // size, np.int64), None
    counts = np.asarray(splits)
    if counts.dtype.kind not in "iu" or counts.shape != (size,) or (counts < 0).any() or counts.sum() > shape[0]:
        return nothing, ConfigError(
            f"alltoall: splits={counts.tolist()} must be {size} whole numbers, none negative, that add up to at most "
            f"the {shape[0]} rows."
        )
    return counts.astype(np.int64), None
