"""How gradients of one layout are reduced: the settings, and what they mean for these gradients."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

import cloudpickle
import numpy as np

from choros.arrays import device_adapter
from choros.comm import Communicator, DType, ProcessSet, Reduction, Request, global_process_set
from choros.comm.devices import Device
from choros.comm.fusion import Exchange, Given, Layout, WireDtype
from choros.errors import ConfigError, EngineError
from choros.parallel.compression import Compression, Compressor, check_compressor
from choros.parallel.compression.compressor import Float16, NoCompression, only, split_exchange
from choros.parallel.compression.sliced import Bfloat16
from choros.parallel.reduce.gradients import GradientLayout, describe, rows_exchange
from choros.parallel.reduce.slices import check_slices, own_items_exchange, scatter_exchange
from choros.parallel.structure import with_items
from choros.settings import VARIABLES, current

#: The size of buckets that are sent during the backward pass: large enough that passing one to another thread costs
#: little, small enough that the first bucket is full early.
_BUCKET_BYTES = 8 << 20
#: Whether and when ranks compare what they train, by default.
_COMPARES = (int(VARIABLES["compare_every"].default), VARIABLES["divergence"].default)


def device_to_reduce_on(
    communicator: Communicator, compressor: Compressor, framework: str, devices: Iterable[Any]
) -> Device | None:
    """Where tensors on ``devices`` are summed; ``None``: on the host, as for compressions that keep an error."""
    different = {Device(device.type, device.index or 0, framework) for device in devices}
    if len(different) != 1 or not isinstance(compressor, NoCompression | Float16):
        return None
    (device,) = different
    collectives = communicator.devices
    return device if collectives is not None and collectives.moves(device.type) else None


def bucket_bytes(*, accelerated: bool, device: Device | None) -> int | None:
    """The size of buckets sent during the backward pass, ``None`` if none is; ``CHOROS_OVERLAP`` decides. By default
    only accelerators' are, as on a CPU the reduction competes for cores; tensors that stay on a GPU are reduced after
    it, in the stream that computes them.
    """
    if device is not None and device.type != "cpu":
        return None
    overlap = current().overlap
    return _BUCKET_BYTES if (accelerated if overlap is None else overlap) else None


def indices_of_groups(
    groups: int | Sequence[Sequence[Any]], trained: Sequence[Any], kind: str
) -> int | tuple[tuple[int, ...], ...] | None:
    """Returns ``ReduceConfig.groups`` for a user's argument: a number of groups, or lists of ``trained`` objects."""
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"groups={groups} must be 0 or more.")
        return groups or None
    index_of = {id(each): index for index, each in enumerate(trained)}
    try:
        indices = tuple(tuple(index_of[id(each)] for each in group) for group in groups)
    except KeyError:
        raise ConfigError(f"groups contains a {kind} that the optimizer does not train: remove it.") from None
    if sum(map(len, indices)) != len({index for group in indices for index in group}):
        raise ConfigError(f"groups contains a {kind} twice: leave it in one group.")
    return indices


def check_passes(passes: object) -> None:
    """Raises a ConfigError unless ``passes`` is a number of backward passes for one update."""
    if not isinstance(passes, Integral) or passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes} must be 1 or more.")


def check_predivision(factor: float, op: Reduction) -> None:
    """Raises a ConfigError if ``factor`` is to divide before a reduction that does not divide."""
    if factor != 1.0 and op is not Reduction.AVERAGE:
        raise ConfigError("gradient_predivide_factor splits the division of an average: it needs op=Average.")


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are reduced: the settings of all distributed optimizers. Averages are over examples; part of the
    division, ``predivide_factor``, precedes the sum. Buckets hold the last layers' first. Ranks first compare what
    they train after ``compared_step``, counting per layout the steps in which all have a batch. ``of_rows``: whether
    they are means over rows, of which the noise scale is measured.
    """

    op: Reduction = Reduction.AVERAGE
    compressor: Compressor = Compression.none
    predivide_factor: float = 1.0
    groups: int | tuple[tuple[int, ...], ...] | None = None
    micro_batches: int = 1
    average_micro_batches: bool = True
    bucket_bytes: int | None = None
    device: Device | None = None
    compared_step: int = 2
    of_rows: bool = True
    process_set: ProcessSet = field(default=global_process_set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Reduction(self.op))
        check_compressor(self.compressor)
        if self.op not in (Reduction.AVERAGE, Reduction.SUM):
            raise ConfigError(f"op={self.op.title}: gradients can be reduced with Average or Sum only.")
        if self.predivide_factor <= 0:
            raise ConfigError(f"gradient_predivide_factor={self.predivide_factor} must be greater than 0.")
        check_predivision(self.predivide_factor, self.op)
        check_passes(self.micro_batches)

    def group_indices(self, count: int) -> list[list[int]]:
        """Returns the groups of ``count`` gradients; those that are in no given group form another one."""
        if self.groups is None or self.groups == 0:
            return [list(range(count))]
        if isinstance(self.groups, int):
            return [part.tolist() for part in np.array_split(np.arange(count), max(1, min(self.groups, count)))]
        named = [[index for index in group if index < count] for group in self.groups]
        rest = sorted(set(range(count)) - {index for group in named for index in group})
        return [group for group in (*named, rest) if group]

    def bucket_indices(self, layout: GradientLayout) -> list[tuple[int, ...]]:
        """Returns each bucket's gradient indices, in sending order; sparse ones last: embeddings are first layers.

        >>> from choros.parallel.reduce.gradients import layout_of
        >>> ReduceConfig(bucket_bytes=2**19).bucket_indices(layout_of([np.ones((256, 256), np.float32)] * 3))
        [(2, 1), (0,)]
        """
        if self.bucket_bytes is None:
            return [tuple(range(len(layout)))]
        buckets: list[list[int]] = [[]]
        filled = 0
        sparse = [index for index, each in enumerate(layout) if each.sparse]
        for index in reversed(range(len(layout))):
            if index in sparse:
                continue
            shape, dtype = layout[index][:2]
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(index)
            filled += math.prod(shape) * dtype.itemsize
        buckets[-1] += sparse
        return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True)
class Plan:
    """How gradients of one layout are reduced: the ``indices`` of those in each bucket, in sending order, the exchange
    that sums the bucket, and the requests of each kind of exchange.
    """

    config: ReduceConfig
    layout: GradientLayout
    communicator: Communicator
    indices: tuple[tuple[int, ...], ...]
    exchanges: tuple[Exchange, ...]
    request: Request
    first_bucket: Request
    micro_batch: Request
    early: Request
    scales_late: bool
    measures: bool
    sliced: bool


def plan_for(config: ReduceConfig, name: str, layout: GradientLayout, compares: tuple[int, str]) -> Plan:
    """Returns the plan of the reducer ``name``; ``compares``: how often ranks compare, and what if they differ."""
    communicator = config.process_set.communicator
    buckets = tuple(config.bucket_indices(layout))
    exchanges = tuple(_exchange_for(config, layout, communicator, indices) for indices in buckets)
    sent = "; ".join(exchange.description for exchange in exchanges)
    scales = f"op={config.op.title}, predivide_factor={config.predivide_factor}"
    counts = f"micro_batches={config.micro_batches}, {len(layout)} arrays"
    if compares != _COMPARES:
        counts += f", compared every {compares[0]} steps, divergence={compares[1]}"
    if every := current().noise_scale:
        counts += f", noise scale every {every} steps"
    arguments = f"{scales}, {counts}: {describe(layout)}; sent as {sent}"
    sliced = any(each.ranges for each in layout)
    if sliced:
        check_slices(max(len(each.ranges) for each in layout), communicator)
    # A rank that has no optimizer cannot take part where each makes the updates of its slice.
    known = config.compressor.shares_state or sliced
    explain = None if known else functools.partial(_explain, config, name, layout)
    step, first_bucket, micro_batch, early = (
        Request(each, arguments, name, explain=explain)
        for each in ("gradients", "gradients in buckets", "micro-batch", "gradients of micro-batches")
    )
    # The sum of unscaled values may overflow float16.
    fits = all(each.dtype != np.float16 for each in layout)
    late = fits and isinstance(config.compressor, NoCompression)
    # Others leave out parts of gradients, or send them later.
    whole = isinstance(config.compressor, NoCompression | Float16 | Bfloat16)
    measures = config.of_rows and whole and not sliced and all(each.dtype.kind != "c" for each in layout)
    return Plan(
        config, layout, communicator, buckets, exchanges, step, first_bucket, micro_batch, early, late, measures, sliced
    )


def _explain(config: ReduceConfig, name: str, layout: GradientLayout) -> bytes:
    """The message for ``GradientReducer.learned``: all but what each process chooses for itself."""
    own = ("process_set", "device", "bucket_bytes")
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in own}
    return bytes(cloudpickle.dumps((settings, name, layout)))


def _exchange_for(
    config: ReduceConfig, layout: GradientLayout, communicator: Communicator, indices: Sequence[int]
) -> Exchange:
    """Returns the exchange of the gradients at ``indices``; groups are kept together within a bucket."""
    unfused = current().fusion_bytes == 0
    shapes = tuple(each[:2] for each in layout)
    groups = [[index] for index in range(len(layout))] if unfused else config.group_indices(len(layout))

    def dense_exchange(dense: Sequence[int]) -> Exchange:
        part, together = only(dense, shapes, groups)
        if config.device is None:
            return config.compressor.exchange(communicator, part, together)
        return device_exchange(communicator, part, together, config.compressor.wire_dtype, config.device)

    def slice_exchange(sliced: Sequence[int]) -> Exchange:
        part = [layout[index] for index in sliced]
        if config.device is None and isinstance(config.compressor, NoCompression | Float16):
            return scatter_exchange(communicator, part, config.compressor.wire_dtype)
        return own_items_exchange(dense_exchange(sliced), part, communicator.rank)

    def row_exchange(sparse: Sequence[int]) -> Exchange:
        part = [layout[index] for index in sparse]
        exchange = rows_exchange(communicator, part, config.compressor.row_dtype)
        return own_items_exchange(exchange, part, communicator.rank) if part[0].ranges else exchange

    kinds: dict[Callable[[Sequence[int]], Exchange], list[int]] = {}
    for index in indices:
        each = layout[index]
        dense = slice_exchange if each.ranges else dense_exchange
        kinds.setdefault(row_exchange if each.sparse else dense, []).append(index)
    if len(kinds) == 1:
        ((exchange_of, _),) = kinds.items()
        return exchange_of(indices)
    positions = {index: position for position, index in enumerate(indices)}
    order = [each for each in (dense_exchange, slice_exchange, row_exchange) if each in kinds]
    return split_exchange([([positions[index] for index in kinds[each]], each(kinds[each])) for each in order])


def device_exchange(
    communicator: Communicator,
    layout: Layout,
    groups: Sequence[Sequence[int]],
    wire_dtype: WireDtype,
    device: Device,
) -> Exchange:
    """Sums tensors by allreduces on their device, without host staging; many to a message, which the framework itself
    packs and unpacks.
    """
    collectives, adapter = communicator.devices, device_adapter(device.framework)
    if collectives is None:
        raise EngineError(f"the {communicator.engine} engine cannot reduce tensors on {device.type} in place.")
    all_sizes = [math.prod(shape) for shape, _ in layout]
    messages: list[tuple[DType, list[int]]] = [
        (wire, [index for index in group if wire_dtype(layout[index][1]) == wire])
        for group in groups
        for wire in dict.fromkeys(wire_dtype(layout[index][1]) for index in group)
    ]

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Any]:
        results: list[Any] = [None] * len(layout)
        for wire, part in messages:
            own = None if arrays is None else [arrays[index] for index in part]
            sizes = [all_sizes[index] for index in part]
            message = adapter.pack(own, sizes, wire, before, device)
            communicator.bytes_sent += sum(sizes) * wire.itemsize
            if sum(sizes):
                collectives.reduce_in_place(adapter.buffer(message, device), Reduction.SUM)
            results = with_items(results, part, adapter.unpack(message, [layout[index] for index in part], after))
        return results

    sent = [f"{wire}{[all_sizes[index] for index in part]}" for wire, part in messages]
    return Exchange(f"on {device.type}: " + ", ".join(sent), reduce)
