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
from contextlib import AbstractContextManager
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from choros.comm.devices import DeviceCollectives
from choros.comm.fusion import CHUNK_BYTES, Chunk, FusionBuffer, Layout, pack, plan_fusion, views
from choros.comm.memory import aligned_empty
from choros.comm.reduction import Reduction, check_dtype, from_working, working_dtype, working_op
from choros.comm.request import Request, caller, mismatch_text
from choros.comm.selection import select_devices
from choros.comm.signature import Signatures
from choros.comm.waiting import LongWait
from choros.comm.work import Work, WorkQueue
from choros.errors import ConfigError, EngineError, MismatchError
from choros.observe import events
from choros.topology import shard_range

__all__ = ["JOINED", "SHUTDOWN", "Communicator", "row_counts"]

P = ParamSpec("P")
T = TypeVar("T")
Array = NDArray[Any]
#: A dtype and a shape.
Kind = tuple[np.dtype[np.generic], tuple[int, ...]]

_log = logging.getLogger("choros")

#: The module of collectives on devices, imported if a rank may use them.
_DEVICES = "choros.comm.engines.device_collectives"
#: The request of a rank that ends: it matches no other, so ranks that still call a collective are notified.
SHUTDOWN = Request(events.SHUTDOWN.removesuffix("()"))
#: The request of a rank that has joined: it matches every request that this rank can participate in.
JOINED = Request("join")


class Communicator(ABC):
    """A set of ranks that exchange arrays in host memory.

    Every collective must be called by all members, in the same order. Arrays are anything
    ``numpy.asarray`` takes; results are new NumPy arrays. A call that the members do not make identically raises
    a ``MismatchError`` on all of them before data moves; one that is wrong on its own (an unknown dtype,
    say) raises a ``ConfigError`` on the rank that made it and a ``MismatchError`` on the others.

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
    """

    engine: ClassVar[str]
    signatures: Signatures | None = None

    def __init__(self, rank: int, ranks: Sequence[int], queue: WorkQueue, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.launched = self.ranks
        self.size = len(self.ranks)
        self.collectives = 0
        self.bytes_sent = 0
        self.chunk_bytes = chunk_bytes
        self._queue = queue
        self._over = ""
        self._asked = SHUTDOWN
        self._scratch: NDArray[np.uint8] | None = None

    # ── collectives ──────────────────────────────────────────────────────────────────────────────

    @final
    def allreduce(
        self, array: ArrayLike, op: Reduction = Reduction.AVERAGE, *, name: str = "", out: Array | None = None
    ) -> Array:
        """Reduces ``array`` over all ranks; every rank gets the result.

        Args:
            array: any shape, including scalars and 0 elements; the same shape and dtype on every rank.
            op: the reduction.
            name: shown in errors; ranks that give different names mismatch.
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
        in_place = out is source and (self.size == 1 or self._is_registered(out))
        if not in_place or working_dtype(out.dtype) != out.dtype:
            return self._allreduce_all("allreduce", [source], op, name, [out])[0]
        with self.exclusive():
            problem = _problem(out.dtype, op) or _problem_of_out(source, out)
            self.agree(_request("allreduce in place", op, ((out.dtype, out.shape),), name), problem=problem)
            flat = out.reshape(-1)
            self.reduce_in_place(flat, working_op(out.dtype, op))
            if op is Reduction.AVERAGE:
                from_working(flat, flat, op, self.size)
        return out

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
        with self.exclusive():
            self.agree(Request("empty", f"dtype={dtype}, shape={dimensions}"))
            memory = self._allocate(max(1, math.prod(dimensions) * dtype.itemsize))
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
        request = Request("allgather", f"dtype={rows.dtype}, shape=(any, {_inner(rows)})", name)
        with self.exclusive():
            lengths = self.agree(request, value=len(rows), problem=_problem(rows.dtype))
            row_bytes = rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
            received = self.gather_bytes(_bytes(rows), [length * row_bytes for length in lengths])
        return received.view(rows.dtype).reshape(sum(lengths), *rows.shape[1:])

    @final
    def broadcast(self, array: ArrayLike, root: int = 0, *, name: str = "") -> Array:
        """Sends the array of the member ``root`` to every rank.

        Args:
            array: the same shape and dtype on every rank; only the root's values matter.
            root: a rank of this communicator.
            name: shown in errors.
        """
        source = np.asarray(array)
        request = Request("broadcast", f"root={root}, dtype={source.dtype}, shape={source.shape}", name)
        problem = _problem(source.dtype)
        if not 0 <= root < self.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self.size} ranks 0 … {self.size - 1}.")
        with self.exclusive():
            self.agree(request, problem=problem)
            buffer = source.flatten()
            self.bytes_sent += buffer.nbytes if root == self.rank else 0
            self._broadcast(buffer.view(np.uint8), root)
        return buffer.reshape(source.shape)

    @final
    def reducescatter(self, array: ArrayLike, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> Array:
        """Reduces ``array`` over all ranks and returns this rank's rows of the result.

        Rows are distributed as by ``shard_range``: the first ranks get the remainder.

        Args:
            array: at least one dimension; the same shape and dtype on every rank.
            op: the reduction.
            name: shown in errors.
        """
        rows = np.asarray(array)
        request = Request("reducescatter", f"op={op.value}, dtype={rows.dtype}, shape={rows.shape}", name)
        problem = _problem(rows.dtype, op)
        if rows.ndim == 0:
            problem = ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")
        with self.exclusive():
            self.agree(request, problem=problem)
            row_items = int(np.prod(rows.shape[1:], dtype=np.int64))
            shares = [shard_range(len(rows), rank, self.size) for rank in range(self.size)]
            counts = [(end - start) * row_items for start, end in shares]
            working = np.empty(rows.size, working_dtype(rows.dtype))
            np.copyto(working, _flat(rows))
            self.bytes_sent += working.nbytes
            working = self._reducescatter(working, counts, working_op(rows.dtype, op))
        start, end = shares[self.rank]
        result = np.empty((end - start, *rows.shape[1:]), rows.dtype)
        from_working(working, result.reshape(-1), op, self.size)
        return result

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
        request = Request("alltoall", f"dtype={rows.dtype}, shape=(any, {_inner(rows)})", name)
        with self.exclusive():
            counts, problem = row_counts(rows.shape, splits, self.size)
            self.agree(request, problem=problem or _problem(rows.dtype))
            eights = [counts.itemsize] * self.size
            received_counts = self._alltoall(counts.view(np.uint8), eights, eights).view(np.int64)
            row_bytes = rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
            received = self.alltoallv_bytes(
                _bytes(rows),
                [int(count) * row_bytes for count in counts],
                [int(count) * row_bytes for count in received_counts],
            )
        shape = (int(received_counts.sum()), *rows.shape[1:])
        return received.view(rows.dtype).reshape(shape), received_counts.astype(np.int32)

    @final
    def barrier(self, *, name: str = "") -> None:
        """Returns when every rank has called it."""
        with self.exclusive():
            self.agree(Request("barrier", name=name))

    @final
    def start(self, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Starts a collective and returns at once; ``Work.wait`` returns its result.

        Arrays must not be changed until then.

        Example:
            >>> from choros.comm.engines.local import LocalCommunicator
            >>> communicator = LocalCommunicator()
            >>> work = communicator.start(communicator.allreduce, [1.0, 2.0], Reduction.SUM)
            >>> work.wait()
            array([1., 2.])
        """
        return self._queue.submit(collective, *args, **kwargs)

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
        with self.exclusive():
            self.agree(Request("split", f"ranks={chosen}"), problem=problem)
            members = self._split(chosen)
        if members is not None:
            members.launched = tuple(self.launched[rank] for rank in chosen)
        return members

    @functools.cached_property
    def devices(self) -> DeviceCollectives | None:
        """Collectives on device tensors; ``None`` if tensors must be copied to the host.

        The connections are made by the first collective, which all members call.
        """
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
        """A context that encloses the calls of one collective; see ``WorkQueue.exclusive``."""
        return self._queue.exclusive()

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
            return [value for _, value in gathered]
        if self._joined_ranks_know(request, gathered, known=problem is None):
            return [value for _, value in gathered]
        mismatch = self._mismatch(request, gathered)
        raise problem or mismatch

    @final
    def join(self, requests: Sequence[Request]) -> tuple[Request, list[int]] | None:
        """Agrees with whatever the other ranks request next, and so participates in steps for which it has no data.

        ::

            rank 0                 rank 1                 rank 2, which has joined
            agree(a, value=8)      agree(a, value=3)      join([a, b]) ─► a, [8, 3, 0]     it does its part of a
            agree(b, value=8)      join([a, b])           join([a, b]) ─► b, [8, 0, 0]     both do their part of b
            join([a, b]) ─► None   join([a, b]) ─► None   join([a, b]) ─► None             all have joined

        Call it inside ``exclusive()``, and complete the collective there.

        Args:
            requests: those in which this rank can participate.

        Returns:
            The other ranks' request, and the ranks' values; 0 for ranks that have joined. ``None``: all have joined.

        Raises:
            MismatchError: on all ranks, if the others' request is not one of ``requests``.
        """
        gathered = self._gather(JOINED, 0)
        digests = {digest for digest, _ in gathered if digest != JOINED.digest}
        if not digests:
            return None
        request = next((request for request in requests if digests == {request.digest}), None)
        if not self._joined_ranks_know(JOINED, gathered, known=request is not None) or request is None:
            raise self._mismatch(JOINED, gathered)
        return request, [value for _, value in gathered]

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
        problems = [problem for dtype in {dtype for dtype, _ in kinds} if (problem := _problem(dtype, op))]
        problems += [problem for pair in zip(arrays, outs or (), strict=False) if (problem := _problem_of_out(*pair))]
        with self.exclusive():
            self.agree(request, problem=next(iter(problems), None))
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

    def _stage(self) -> NDArray[np.uint8]:
        """The memory in which chunks are packed; allocated once, and again if chunks become larger."""
        if self._scratch is None or self._scratch.nbytes < self.chunk_bytes:
            self._scratch = self._allocate(self.chunk_bytes)
        return self._scratch

    def _observed(self, request: Request, header: NDArray[np.int64]) -> NDArray[np.int64]:
        """``_exchange``, with events before and after it, and one when the collective is done."""
        name, sent, begun = request.name or request.collective, self.bytes_sent, time.perf_counter()

        def emit(kind: events.Kind, **details: events.Detail) -> None:
            events.emit(kind, name, collective=request.collective, process_set=self.ranks, **details)

        def done() -> None:
            seconds = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_DONE, bytes=self.bytes_sent - sent, seconds=seconds)

        self._queue.on_exit(done)
        emit(events.Kind.COLLECTIVE_BEGUN)
        table = self._exchange(header)
        emit(events.Kind.COLLECTIVE_MATCHED, waited=round(time.perf_counter() - begun, 6))
        return table

    def _gather(self, request: Request, value: int) -> list[list[int]]:
        """The control message: returns every rank's digest and value."""
        self.collectives += 1
        exchange = functools.partial(self._observed, request) if events.active() else self._exchange
        # Plain integers: this runs in every step, and for some ranks they are compared faster than arrays.
        return self._control_message(request, (request.digest, value), exchange).tolist()  # type: ignore[no-any-return]

    def _joined_ranks_know(self, request: Request, gathered: list[list[int]], *, known: bool) -> bool:
        """Whether ranks have joined, and know the one request that all others made; every rank asks the same.

        Only a joined rank knows whether it does, so this takes another control message.
        """
        digests = {digest for digest, _ in gathered}
        if JOINED.digest not in digests or len(digests) > 2:
            return False
        return bool(self._control_message(request, (known, 0), self._exchange)[:, 0].all())

    def _control_message(
        self, request: Request, header: tuple[int, int], exchange: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        if self._over:
            raise MismatchError(self._over)
        self._asked = request
        try:
            return exchange(np.array(header, np.int64))
        except EngineError:
            raise
        except BaseException:
            # Ctrl-C, or a signal's handler: the other ranks consider this request made and would wait for its data.
            self._over = f"{request} was interrupted on this rank, which cannot communicate any more."
            raise

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
        text = str(request) if request == SHUTDOWN else f"{request} at {caller() or 'unknown location'}"
        mine = np.frombuffer(text.encode(), np.uint8)
        lengths = self._exchange(np.array([len(mine), 0], np.int64))[:, 0]
        together = self._allgather(mine, [int(length) for length in lengths]).tobytes()
        ends = np.cumsum(lengths)
        texts = [together[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]
        return mismatch_text(texts, self.ranks)

    # ── the engine's primitives ────────────────────────────────────────────────────────────────

    @abstractmethod
    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        """Gathers every rank's two integers: shape ``(size, 2)``. The one control message."""

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
    return Request(collective, f"op={op.value}, {each}", name)


def _problem_of_out(array: Array, out: Array) -> ConfigError | None:
    if (out.shape, out.dtype) == (array.shape, array.dtype) and out.flags.c_contiguous and out.flags.writeable:
        return None
    return ConfigError(f"out must be a writable, contiguous array of dtype {array.dtype} and shape {array.shape}.")


def _inner(rows: Array) -> str:
    return ", ".join(map(str, rows.shape[1:]))


def _problem(dtype: np.dtype[np.generic], op: Reduction | None = None) -> ConfigError | None:
    try:
        check_dtype(dtype, op)
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
