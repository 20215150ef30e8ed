"""The communicator: the collectives of a set of ranks, with one interface for all engines. The public ones are
written once, and it is made of parts::

    Communicator    allreduce, broadcast, …: one request and one move each (transfers.py, fusion.py)
      Members       agree, atomic: all members make the same call, and complete it or none does; members change
        WorkQueue   the calls of this rank: whose turn it is among its threads
      Primitives    what an engine implements
"""

import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, TypeVar, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from choros.comm.devices import Device, DeviceCollectives, DeviceLink, select_devices
from choros.comm.fusion import Layout
from choros.comm.members import Members
from choros.comm.reduction import Array, DType, Reduction, dtype_problem, working_dtype, working_op, writer
from choros.comm.request import CollectiveSpec, Request, digest_of
from choros.comm.transfers import (
    broadcast_from,
    exchange_rows,
    gather_all,
    gather_rows,
    reduce_all,
    reduce_and_scatter,
    row_counts,
)
from choros.comm.work import Work
from choros.errors import ConfigError, EngineError, PeerLostError
from choros.settings import current

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("choros")


class Communicator(Members):
    """A set of ranks that exchange arrays in host memory.

    Every collective must be called by all members: those with a name in any order and from any thread, those without
    one in the same order (see ``members.py``). Arrays are anything ``numpy.asarray`` takes; results are new NumPy
    arrays. A call that the members do not make identically raises a ``MismatchError`` on all of them before data moves;
    one that is wrong on its own (an unknown dtype, say) raises a ``ConfigError`` on the rank that made it and a
    ``MismatchError`` on the others. Then the members continue with their next calls. Attributes: see ``Primitives``.
    """

    @final
    def allreduce(
        self,
        array: ArrayLike,
        op: Reduction = Reduction.AVERAGE,
        *,
        name: str = "",
        out: Array | None = None,
        scaled: str = "",
    ) -> Array:
        """Reduces ``array`` over all ranks, into ``out``, maybe ``array``: that, or one from ``empty``, saves copies.
        ``scaled``: how callers scale, here and in other reductions, which must be the same on every rank, too.

        >>> from choros.comm.engines.local import LocalCommunicator
        >>> LocalCommunicator().allreduce([1.0, 2.0])
        array([1., 2.])
        """
        source = np.asarray(array)
        if out is not None and out is source and (self.size == 1 or self._is_registered(out)):
            request, engine_op = _in_place(out.dtype, out.shape, op, name, scaled)
            if request is not None and _problem_of_out(source, out) is None:
                kept = out.copy() if self.elastic else out
                reduce = functools.partial(self._reduce_whole, request, out, engine_op, op)
                self.atomic(reduce, again=lambda: np.copyto(out, kept))
                return out
        return self._allreduce_all("allreduce", [source], op, name, None if out is None else [out], scaled)[0]

    @final
    def grouped_allreduce(
        self,
        arrays: Sequence[ArrayLike],
        op: Reduction = Reduction.AVERAGE,
        *,
        name: str = "",
        out: Sequence[Array] | None = None,
        scaled: str = "",
    ) -> list[Array]:
        """``allreduce`` of several arrays, checked with one control message for all of them.

        >>> from choros.comm.engines.local import LocalCommunicator
        >>> arrays = [np.ones(2), np.ones(1)]
        >>> LocalCommunicator().grouped_allreduce(arrays, Reduction.SUM, out=arrays)
        [array([1., 1.]), array([1.])]
        """
        outs = None if out is None else list(out)
        given = [np.asarray(array) for array in arrays]
        return self._allreduce_all("grouped_allreduce", given, op, name, outs, scaled)

    @final
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An uninitialised array in memory that is reduced fastest; every rank calls it. Dead once this is closed.

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
        """Concatenates the arrays along the first dimension, by rank; it may differ, and a scalar counts as a row."""
        rows = np.atleast_1d(np.asarray(array))
        request = _request("allgather", ((rows.shape[1:], rows.dtype),), name, of_rows=True)
        return self.atomic(
            lambda: gather_rows(self, rows, self.agree(request, value=len(rows), problem=dtype_problem(rows.dtype)))
        )

    @final
    def grouped_allgather(self, arrays: Sequence[ArrayLike], *, name: str = "", summed: str = "") -> list[Array]:
        """``allgather`` of several arrays in few messages: small ones are sent together. ``summed``: how callers sum
        what they receive, which must be the same on every rank, too.

        >>> from choros.comm.engines.local import LocalCommunicator
        >>> LocalCommunicator().grouped_allgather([[1.5], [2, 3]])
        [array([1.5]), array([2, 3])]
        """
        parts = [np.atleast_1d(np.asarray(array)) for array in arrays]
        rows = tuple([(part.shape[1:], part.dtype) for part in parts])
        request = _request("grouped_allgather", rows, name, of_rows=True, scaled=summed)
        problem = _problem_of(parts)
        lengths = np.array([len(rows) for rows in parts], np.int64)

        def collective() -> list[Array]:
            values = self.agree(request, value=digest_of(lengths.tobytes()), problem=problem)
            return gather_all(self, parts, lengths, values)

        return self.atomic(collective)

    @final
    def broadcast(self, array: ArrayLike, root: int = 0, *, name: str = "", heirs: Sequence[int] = ()) -> Array:
        """Sends the array of the member ``root`` to every rank; of the others' only shape and dtype matter, but if the
        root is lost, the first left of ``heirs``, as the launcher numbers them, sends its own.
        """
        source = np.asarray(array)
        problem = dtype_problem(source.dtype)
        if not 0 <= root < self.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self.size} ranks 0 … {self.size - 1}.")
        senders = [self.launched[root], *heirs] if problem is None else []

        def collective() -> Array:
            rank = self.first_left(senders, "the sender of a broadcast") if senders else root
            self.agree(_request("broadcast", ((source.shape, source.dtype),), name, root=rank), problem=problem)
            return broadcast_from(self, rank, source)

        return self.atomic(collective)

    @final
    def reducescatter(
        self, array: ArrayLike, op: Reduction = Reduction.AVERAGE, *, name: str = "", scaled: str = ""
    ) -> Array:
        """Reduces ``array`` over all ranks and returns this rank's rows of the result, as by ``shard_range``."""
        return self._scatter_all("reducescatter", [np.asarray(array)], op, name, scaled)[0]

    @final
    def grouped_reducescatter(
        self, arrays: Sequence[ArrayLike], op: Reduction = Reduction.AVERAGE, *, name: str = "", scaled: str = ""
    ) -> list[Array]:
        """``reducescatter`` of several arrays in few messages: small ones of one dtype are sent together."""
        return self._scatter_all("grouped_reducescatter", [np.asarray(array) for array in arrays], op, name, scaled)

    @final
    def alltoall(
        self, array: ArrayLike, splits: ArrayLike | None = None, *, name: str = ""
    ) -> tuple[Array, NDArray[np.int32]]:
        """Sends rows to every rank (``None``: equally many); returns those received by sender, and their numbers."""
        rows = np.asarray(array)
        request = _request("alltoall", ((rows.shape[1:], rows.dtype),), name, of_rows=True)
        members = self.launched

        def collective() -> tuple[Array, NDArray[np.int32]]:
            if splits is not None and self.launched != members:
                raise PeerLostError("alltoall: splits gives rows to a rank that was lost.")
            counts, problem = row_counts(rows.shape, splits, self.size)
            self.agree(request, problem=problem or dtype_problem(rows.dtype))
            return exchange_rows(self, rows, counts)

        return self.atomic(collective)

    @final
    def barrier(self, *, name: str = "") -> None:
        """Returns when every rank has called it."""
        self.agree(_request("barrier", (), name))

    @final
    def start(self, name: str, collective: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Starts a collective, or some in a row, that ranks match by ``name``: in any order, once at a time; ``""``: in
        the order of such calls. Do not change its arrays until ``Work.wait``.

        >>> from choros.comm.engines.local import LocalCommunicator
        >>> communicator = LocalCommunicator()
        >>> work = communicator.start("", communicator.allreduce, [1.0, 2.0], Reduction.SUM)
        >>> work.wait()
        array([1., 2.])
        """
        return self._queue.submit(name, collective, *args, **kwargs)

    @final
    def split(self, ranks: Sequence[int]) -> Self | None:
        """A communicator of some members only, by ascending rank, ``None`` on others; every member must call it."""
        chosen = sorted(set(ranks))
        problem = None
        if len(chosen) != len(ranks) or not chosen or not set(chosen) <= set(range(self.size)):
            problem = ConfigError(f"ranks {list(ranks)} are not distinct ranks of 0 … {self.size - 1}.")
        launched = [self.launched[rank] for rank in chosen] if problem is None else []

        def split() -> Any:
            left = [self.launched.index(each) for each in launched if each in self.launched]
            self.agree(Request("split", f"ranks={left if problem is None else chosen}"), problem=problem)
            members = self._split(left)
            if members is not None:
                members.whole, members.launched = self.whole, tuple(self.launched[rank] for rank in left)
                members.chunk_bytes = self.chunk_bytes
            return members

        own: Self | None = self.atomic(split)
        return own

    @functools.cached_property
    def devices(self) -> DeviceCollectives | None:
        """Collectives on device tensors, which the first one connects; ``None`` if tensors go through the host."""
        if self.elastic:
            return None  # a library of devices cannot go on without a rank
        module, kinds, reason = select_devices(self.engine, self.size, current())
        if self.rank == 0:
            _log.info("tensors on devices: %s.", reason)
        if module is None:
            return None

        def connect(device: Device) -> DeviceLink:
            # Imported by the first connection: without one, no rank waits for PyTorch's import.
            link: DeviceLink = importlib.import_module(f"choros.comm.engines.{module}").connect(self, device)
            return link

        return DeviceCollectives(self, kinds, connect)

    @final
    def close(self) -> None:
        """Releases the communicator's resources; all members must call it. A collective after it is an error."""
        if "devices" in self.__dict__ and self.devices is not None:
            self.devices.close()
        self._queue.close()
        self.kept.clear()
        self._close()
        self._exchange = _closed  # type: ignore[assignment, method-assign]  # no call of an open one pays for a check

    @final
    def only(self, ranks: Sequence[int]) -> Self:
        """``split`` in place of this communicator, which is closed; its members become all ranks of the job."""
        members = self.split(ranks)
        self.close()
        if members is None:
            raise ConfigError(f"init(comm={list(ranks)}) was called on rank {self.rank}, which is not in the list.")
        members.whole = members
        return members

    def _allreduce_all(
        self,
        collective: str,
        arrays: list[Array],
        op: Reduction,
        name: str,
        outs: list[Array] | None,
        scaled: str,
    ) -> list[Array]:
        layout = tuple([(array.shape, array.dtype) for array in arrays])
        request = _request(collective, layout, name, op=op, scaled=scaled)
        problem = _problem_of(arrays, op, whole=True)
        problem = problem or next(filter(None, map(_problem_of_out, arrays, outs or ())), None)
        if outs is not None and len(outs) != len(arrays):
            problem = ConfigError(f"out has {len(outs)} arrays: expected one for each of the {len(arrays)}.")

        def reduce() -> list[Array]:
            self.agree(request, problem=problem)
            return reduce_all(self, layout, arrays, op, None if self.elastic else outs)

        results = self.atomic(reduce)
        if outs is None or not self.elastic:
            return results
        for out, result in zip(outs, results, strict=True):  # only now: ``out`` may be the array itself
            np.copyto(out, result)
        return outs

    def _scatter_all(self, collective: str, arrays: list[Array], op: Reduction, name: str, scaled: str) -> list[Array]:
        layout = tuple([(array.shape, array.dtype) for array in arrays])
        request = _request(collective, layout, name, op=op, scaled=scaled)
        problem = _problem_of(arrays, op)
        if problem is None and not all(array.shape for array in arrays):
            problem = ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")

        def scatter() -> list[Array]:
            self.agree(request, problem=problem)
            return reduce_and_scatter(self, arrays, op)

        return self.atomic(scatter)

    def _reduce_whole(self, request: Request, out: Array, engine_op: Reduction, op: Reduction) -> None:
        self.agree(request)
        flat = out.reshape(-1)
        self.reduce_in_place(flat, engine_op)
        writer(op, self.size)(flat, flat)


def bytes_of_first(communicator: Communicator, make: Callable[[], bytes], what: str) -> bytes:
    """Returns, on all members, what ``make`` returns on rank 0; if it fails there, all raise an error.

    >>> from choros.comm.engines.local import LocalCommunicator
    >>> bytes_of_first(LocalCommunicator(), lambda: b"host:port", "the start")
    b'host:port'
    """
    made, problem = b"", None
    if communicator.rank == 0:
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  (the others wait, whatever it is)
            problem = EngineError(f"{what} has failed: {error}")
    length, *_ = communicator.agree(Request(what), value=len(made), problem=problem)
    sent = np.frombuffer(made, np.uint8) if made else np.zeros(length, np.uint8)
    return communicator.broadcast(sent, name=what).tobytes()


def _closed(_: NDArray[np.int64]) -> NDArray[np.int64]:
    raise EngineError(
        "a collective of ranks that shutdown() has parted: expected were objects made after the next init(), or calls "
        "before shutdown()."
    )


@functools.lru_cache(maxsize=1024)
def _request(
    collective: str,
    layout: Layout,
    name: str,
    *,
    op: Reduction | None = None,
    root: int | None = None,
    of_rows: bool = False,
    scaled: str = "",
) -> Request:
    """Cached, as most requests are made every step; so is their digest. ``of_rows``: shapes are those of one row."""
    given = [*([] if op is None else [f"op={op.title}"]), scaled]
    given += [] if root is None else [f"root={root}"]
    shapes = [f"(any, {', '.join(map(str, shape))})" if of_rows else str(shape) for shape, _ in layout]
    given += ["; ".join(f"dtype={dtype}, shape={shape}" for (_, dtype), shape in zip(layout, shapes, strict=True))]
    spec = None
    if collective != "allreduce in place":  # its memory is the callers'
        arrays = tuple((dtype.name, shape) for shape, dtype in layout)
        spec = CollectiveSpec(collective, arrays, Reduction.AVERAGE if op is None else op, root)
    return Request(collective, ", ".join(filter(None, given)), name, spec)


@functools.lru_cache(maxsize=256)
def _in_place(
    dtype: DType, shape: tuple[int, ...], op: Reduction, name: str, scaled: str
) -> tuple[Request | None, Reduction]:
    """The request of an allreduce in place, and the engine's operation; ``None`` if engines do not reduce it so."""
    if op is Reduction.ADASUM or dtype_problem(dtype, op) is not None or working_dtype(dtype) != dtype:
        return None, op
    request = _request("allreduce in place", ((shape, dtype),), name, op=op, scaled=scaled)
    return request, working_op(dtype, op)


def _problem_of(arrays: Sequence[Array], op: Reduction | None = None, *, whole: bool = False) -> ConfigError | None:
    """Why these arrays cannot be moved, or reduced: see ``dtype_problem``."""
    for dtype in {array.dtype for array in arrays}:
        problem = dtype_problem(dtype, op, whole=whole)
        if problem is not None:
            return problem
    return None


def _problem_of_out(array: Array, out: Array) -> ConfigError | None:
    flags = out.flags
    if (out.shape, out.dtype) == (array.shape, array.dtype) and flags.c_contiguous and flags.writeable:
        return None
    return ConfigError(f"out must be a writable, contiguous array of dtype {array.dtype} and shape {array.shape}.")
