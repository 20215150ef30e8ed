"""The reducer of gradients over the ranks, for Keras optimizers of both programming models and TensorFlow's loops.

::

    apply(gradients) ─► OptimizerReducer.reduce ─┬─ GradientReducer, through one host call; it averages, or sums in a
                 tape.gradient(loss, sources) ─┘ │  strategy's custom loop (on torch also during the backward pass of
                                                 │  fit, or on its device)
                                                 └─ replicas that are devices of one process: the strategy's sum
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArrayAdapter, ArraySpec, device_adapter, framework_adapter
from choros.comm import Reduction, global_process_set
from choros.comm.devices import Device
from choros.comm.joining import Participation
from choros.errors import ConfigError
from choros.parallel.identical import check_identical
from choros.parallel.reduce.device import device_to_reduce_on
from choros.parallel.reduce.gradients import Gradient, GradientLayout, RowsLayout, SparseRows, layout_of
from choros.parallel.reduce.plan import ReduceConfig, bucket_bytes
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import BackwardExchange, are_replaceable
from choros.training.device import accelerated, tensorflow_gpu
from choros.training.keras_internals.models import read_gathered_rows_only, torch_device
from choros.training.variables import overwrite
from choros.training.weighting import correction, current_step

Array = NDArray[Any]
#: A number that the host returns to the training step.
_FLAG = ArraySpec((), np.dtype(np.int32))

if keras.backend.backend() == "tensorflow":  # before a step is traced
    read_gathered_rows_only()


@final
class OptimizerReducer:
    """Reduces one Keras optimizer's gradients, or tapes', and knows which ranks keep its state (``None``: all).
    ``configure`` is called late: a strategy wraps optimizers that are still being constructed. In a prepared step
    (``weighting.py``) ranks weigh by their examples, elsewhere all the same.
    """

    def __init__(
        self,
        configure: Callable[[], ReduceConfig],
        *,
        scale_local_gradients: bool = True,
        sparse_as_dense: bool = False,
        op: Callable[[], Reduction] | None = None,
        sum_over_devices: Callable[[list[Any]], list[Any]] | None = None,
        state_owner: int | None = None,
        advice: str = "",
    ) -> None:
        self.name = ""
        self.state_owner = state_owner
        self._configure = configure
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self._sum_over_devices = sum_over_devices
        self._backward: BackwardExchange | None = None
        self._advice = advice
        self._scale_local = scale_local_gradients
        self.local: list[Any] = []
        #: By the layout of their gradients, the variables of the steps so far.
        self._variables: dict[GradientLayout, list[Any]] = {}
        #: Whether a comparison is due after the update, in a step that is being compiled too; and by which reducer.
        self._due: Any = None
        self._last: GradientReducer | None = None

    @cached_property
    def reducer(self) -> GradientReducer:
        """The reducer of host arrays, or of tensors on torch."""
        reducer = GradientReducer(self._configure(), self.name)
        reducer.correction = correction
        return reducer

    @cached_property
    def _summing(self) -> GradientReducer:
        """Sums, for a strategy's custom loop; without torch's backward pass: a loop need not apply what it computes."""
        config = dataclasses.replace(self.reducer.config, op=Reduction.SUM)
        return GradientReducer(dataclasses.replace(config, bucket_bytes=None) if _on_torch() else config)

    @property
    def has_state(self) -> bool:
        """Whether this rank keeps the optimizer's state, such as its moments, and makes the updates."""
        return self.state_owner is None or self.state_owner == global_process_set.communicator.rank

    @property
    def reduces_all(self) -> bool:
        """Whether all gradients are reduced over all ranks."""
        return self.reducer.config.process_set is global_process_set and not self.local

    def is_local(self, variable: Any) -> bool:
        """Whether ``variable``'s gradient stays on its rank."""
        return any(variable is local for local in self.local)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], micro_batches: Any = 0, examples: Any = None
    ) -> list[Any]:
        """Reduces this rank's gradients for the update; ``micro_batches``: the calls of ``apply`` before this one."""
        gradients = list(gradients)
        self._due = None
        if self._sparse_as_dense:
            adapter = _adapter()
            gradients = [adapter.to_dense(g, tuple(v.shape)) for g, v in zip(gradients, variables, strict=True)]
        reducer = self.reducer
        if self._op is not None and self._op() is Reduction.SUM:
            if self._sum_over_devices is not None:
                return self._sum_over_devices(gradients)
            reducer = self._summing
        config = reducer.config
        step = current_step()
        of_all_ranks = step is not None and step.of_all_ranks
        if of_all_ranks or not reducer.active:
            factor = 1 if config.average_micro_batches else config.micro_batches
            if of_all_ranks and config.op is Reduction.SUM:
                factor *= config.process_set.communicator.size
            pairs = zip(gradients, variables, strict=True)
            return gradients if factor == 1 else [None if g is None else _scaled(g, factor, v) for g, v in pairs]
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        shared = [index for index in given if not self.is_local(variables[index])] if self.local else given
        own, trained = [gradients[i] for i in shared], [variables[i] for i in shared]
        reduced = self._reduce(reducer, own, trained, micro_batches, examples)
        # Keras divides by the number of micro-batches, as for reduced gradients.
        factor = 1 if config.average_micro_batches else config.micro_batches
        divisor = config.process_set.communicator.size if self._scale_local else 1
        for index in set(given) - set(shared):
            gradients[index] = _scaled(gradients[index], factor / divisor, variables[index])
        for index, gradient in zip(shared, reduced, strict=True):
            gradients[index] = gradient
        return gradients

    @property
    def is_due(self) -> bool:
        """Whether a comparison is due after the update, or may be when the step that is being compiled runs."""
        if self.state_owner is not None or self._due is None:  # all have just received the owner's values
            return False
        return _adapter().is_symbolic([self._due]) or bool(self._due)

    def compare(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """At times checks that all ranks have these values after the update; on JAX the caller assigns the healed."""
        due, reducer, values = self._due, self._last, list(values)
        if reducer is None or not self.is_due:
            return values
        self._due = None
        shared = [index for index, variable in enumerate(variables) if not self.is_local(variable)]
        names = [getattr(variables[index], "path", variables[index].name) for index in shared]
        own = [values[index] for index in shared]
        adapter = _adapter()
        in_place = keras.backend.backend() != "jax"
        healed: dict[int, Any] = {}

        def assign(index: int, host: Array) -> None:
            if in_place:
                overwrite(variables[shared[index]], host)
            else:
                healed[index] = host

        def check(arrays: Sequence[Any]) -> None:
            if reducer.due is not None:
                process_set = reducer.config.process_set
                check_identical(names, arrays, reducer.due, advice=self._advice, process_set=process_set, assign=assign)

        if not adapter.is_symbolic([due]):
            check(own)
            return _replaced(values, {shared[i]: adapter.from_host(host, own[i]) for i, host in healed.items()})
        if in_place or reducer.divergence != "heal":

            def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
                check(hosts)
                return [np.asarray(0, np.int32)]

            tensors = adapter.values_if(due > 0, own)
            keras.ops.cond(
                due > 0, lambda: adapter.host_call(on_host, tensors, [_FLAG])[0], lambda: keras.ops.zeros((), "int32")
            )
            return values

        def healing(hosts: Sequence[Array]) -> Sequence[Array]:
            healed.clear()
            check(hosts)
            return [healed.get(index, host) for index, host in enumerate(hosts)]

        specs = [adapter.spec(value) for value in own]
        results = keras.ops.cond(due > 0, lambda: adapter.host_call(healing, own, specs), lambda: own)
        return _replaced(values, dict(zip(shared, results, strict=True)))

    def _reduce(
        self, reducer: GradientReducer, gradients: list[Any], variables: list[Any], micro_batches: Any, examples: Any
    ) -> list[Any]:
        config, self._last = reducer.config, reducer
        layout = tuple(_layout(g, v) for g, v in zip(gradients, variables, strict=True))
        self._variables[layout] = variables
        if examples is None:
            step = current_step()
            examples = 1 if step is None else step.examples
        if _on_torch() and (config.bucket_bytes is not None or config.device is not None):
            if config.bucket_bytes is not None:
                # Hooks send full buckets in ``loss.backward()``, from the second step on: ``apply`` is too late.
                parameters = [variable.value for variable in variables]
                if self._backward is None:
                    self._backward = BackwardExchange(self.reducer, parameters, overlap=True, examples=_step_examples)
                reduced = self._backward.reduce(parameters, gradients)
            else:
                exchange = (int(micro_batches) + 1) % config.micro_batches == 0
                reduced = reducer.reduce(gradients, examples=int(examples), exchange=exchange)
            self._due = reducer.due is not None
            return reduced
        if config.bucket_bytes is not None:
            return self._reduce_buckets(reducer, gradients, layout, examples)

        def on_host(hosts: Sequence[Array], own: list[Gradient], out: Sequence[Array] | None) -> list[Gradient]:
            done, count = map(int, hosts)
            exchange = (done + 1) % config.micro_batches == 0
            return reducer.reduce(own, examples=count, exchange=exchange, layout=layout, out=out)

        numbers, flag = (micro_batches, examples), lambda: reducer.due is not None
        keeps = reducer.may_repeat or (_on_torch() and not are_replaceable(gradients, [v.value for v in variables]))
        reduced, self._due = _host_call(on_host, numbers, gradients, layout, config.device, flag, keeps=keeps)
        return reduced

    def _reduce_buckets(
        self, reducer: GradientReducer, gradients: list[Any], layout: GradientLayout, examples: Any
    ) -> list[Any]:
        """One host call per bucket, by side effects in one order; in an elastic job the last returns all gradients."""
        reduced, flag, keeps = list(gradients), lambda: reducer.due is not None, reducer.may_repeat
        buckets, everything, device = reducer.plan(layout), tuple(range(len(layout))), reducer.config.device
        kept: dict[int, Gradient] = {}
        sums: dict[int, Gradient] = {}
        for bucket, indices in enumerate(buckets):
            returned = indices if not keeps else everything if bucket == len(buckets) - 1 else ()

            def on_host(
                hosts: Sequence[Array],
                own: list[Gradient],
                out: Sequence[Array] | None,
                bucket: int = bucket,
                indices: tuple[int, ...] = indices,
                returned: tuple[int, ...] = returned,
            ) -> list[Gradient]:
                if bucket == 0:
                    reducer.plan(layout)
                if keeps:  # the framework's memory has other values after this call
                    own, out = own if returned else [copy.deepcopy(each) for each in own], None
                    kept.update(zip(indices, own, strict=True))
                examples = int(hosts[0])
                results = reducer.send(bucket, own, examples=examples, out=out)
                sums.update(zip(indices, results or (), strict=results is not None))
                if results is None and returned:
                    again = reducer.reduce([kept[index] for index in everything], examples=examples, layout=layout)
                    sums.update(enumerate(again))
                if returned:
                    kept.clear()
                return [sums.pop(index) for index in returned]

            part, results_layout = (tuple(layout[index] for index in each) for each in (indices, returned))
            own = [gradients[index] for index in indices]
            results, self._due = _host_call(on_host, (examples,), own, part, device, flag, results_layout, keeps=keeps)
            for index, result in zip(returned, results, strict=True):
                reduced[index] = result
        return reduced

    def reduce_early(self) -> list[tuple[Any, Any]]:
        """Reduces gradients of micro-batches now, on all ranks between two steps; returns what is to be accumulated."""
        pairs: list[tuple[Any, Any]] = []
        for layout, gradients in self.reducer.reduce_early().items():
            pairs += zip(self._variables.get(layout, ()), gradients, strict=False)
        return [(each, _adapter().to_dense(tensor_of(gradient), tuple(each.shape))) for each, gradient in pairs]

    def participation(
        self, variables: Sequence[Any], on_update: Callable[[list[Gradient], Sequence[Any]], None] | None = None
    ) -> Participation:
        """As ``GradientReducer.participation``; sparse ones may come, ``on_update`` gets those of others' steps."""

        def update(reduced: list[Gradient]) -> None:
            if on_update is not None:
                on_update(reduced, self._variables.get(layout_of(reduced), variables))

        dense = tuple((tuple(v.shape), _dtype(v)) for v in variables)
        sparse = []
        if keras.backend.backend() == "tensorflow" and not self._sparse_as_dense and any(map(_is_embedding, variables)):
            for index_dtype in (np.dtype(np.int32), np.dtype(np.int64)):
                pairs = zip(variables, dense, strict=True)
                sparse.append(tuple(RowsLayout(*each, index_dtype) if _is_embedding(v) else each for v, each in pairs))
        return self.reducer.participation(dense, update, sparse)


def _replaced(values: list[Any], new: Mapping[int, Any]) -> list[Any]:
    return [new.get(index, value) for index, value in enumerate(values)]


def _step_examples() -> Any:
    """The number of examples in the batch; ``None`` outside of steps, whose backward passes involve no other rank."""
    step = current_step()
    return None if step is None else step.examples


def tensor_of(gradient: Gradient) -> Any:
    """Returns a reduced gradient as a tensor of Keras' framework; ``SparseRows`` as its sparse gradient."""
    if isinstance(gradient, np.ndarray):
        return keras.ops.convert_to_tensor(gradient)
    if not isinstance(gradient, SparseRows):
        return gradient
    indices, values = map(keras.ops.convert_to_tensor, (gradient.indices, gradient.values))
    return _adapter().from_rows(indices, values, gradient.shape)


def _host_call(
    function: Callable[[Sequence[Array], list[Gradient], Sequence[Array] | None], Sequence[Gradient]],
    numbers: Sequence[Any],
    gradients: Sequence[Any],
    layout: GradientLayout,
    device: Any,
    flag: Callable[[], bool],
    returned: GradientLayout | None = None,
    *,
    keeps: bool,
) -> tuple[list[Any], Any]:
    """Calls ``function(numbers, gradients, out)`` on the host, from any step; returns gradients, and ``flag()`` then.
    A sparse one is two arrays of varying rows, indices and values; on a ``device`` dense ones stay. ``out``: arrays
    for results, those of ``gradients`` unless it ``keeps`` these until it returns, or ``None``.
    """
    adapter, returned = _adapter(), layout if returned is None else returned
    inputs = [keras.ops.convert_to_tensor(number, "int32") for number in numbers]
    for gradient in gradients:
        rows = adapter.rows_of(gradient)
        inputs += (gradient,) if rows is None else rows[:2]

    def on_host(hosts: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        results: list[Array] = []
        own = _joined(hosts[len(numbers) :], layout, _rows_on_host)
        for result in function(hosts[: len(numbers)], own, out):
            results += (result.indices, result.values) if isinstance(result, SparseRows) else (result,)
        return [*results, np.asarray(flag(), np.int32)]

    outputs: list[ArraySpec] = []
    for each in returned:
        if isinstance(each, RowsLayout):
            outputs += ArraySpec((None,), each.index_dtype), ArraySpec((None, *each.shape[1:]), each.dtype)
        else:
            outputs.append(ArraySpec(*each))
    outputs.append(_FLAG)
    if device is not None:
        *results, flagged = device_adapter(device.framework).device_call(on_host, inputs, outputs)
    elif returned != layout or any(isinstance(each, RowsLayout) for each in layout):
        *results, flagged = adapter.host_call(on_host, inputs, outputs)
    else:
        *results, flagged = adapter.host_update(on_host, inputs, outputs, replaced=len(gradients), keeps=keeps)
    return _joined(results, returned, adapter.from_rows), flagged


def _rows_on_host(indices: Any, values: Any, shape: tuple[int, ...]) -> SparseRows:
    if not isinstance(values, np.ndarray):
        indices, values = map(_adapter().to_host, (indices, values))
    return SparseRows(indices, values, shape)


def _joined(arrays: Sequence[Any], layout: GradientLayout, from_rows: Callable[..., Any]) -> list[Any]:
    parts = iter(arrays)
    return [
        from_rows(next(parts), next(parts), each.shape) if isinstance(each, RowsLayout) else next(parts)
        for each in layout
    ]


def _layout(gradient: Any, variable: Any) -> Any:
    """The entry of a gradient in the layout: its static shape may be unknown, that of the variable is not."""
    rows = _adapter().rows_of(gradient)
    shape = tuple(variable.shape)
    if rows is None:
        return shape, _dtype(gradient)
    return RowsLayout(shape, _dtype(rows[1]), _dtype(rows[0]), repeats=_is_embedding(variable))


def _is_embedding(variable: Any) -> bool:
    """Whether ``variable`` is the table of a ``keras.layers.Embedding``, which gives it this name."""
    return bool(getattr(variable, "name", None) == "embeddings")


def _scaled(gradient: Any, factor: float, variable: Any) -> Any:
    adapter = _adapter()
    rows = adapter.rows_of(gradient)
    return gradient * factor if rows is None else adapter.from_rows(rows[0], rows[1] * factor, tuple(variable.shape))


def _adapter() -> ArrayAdapter:
    return framework_adapter(keras.backend.backend())


def placed(config: ReduceConfig) -> ReduceConfig:
    """Returns ``config`` with the device and the bucket size that suit the framework and its device."""
    backend, device = keras.backend.backend(), None  # on JAX through host memory
    if backend != "jax" and config.process_set.included():
        own: Any
        if backend == "torch":
            import torch

            own = torch.empty(0, device=torch_device()).device
        else:
            gpu = tensorflow_gpu()
            own = Device("cpu") if gpu is None else Device("cuda", gpu)
        device = device_to_reduce_on(config.process_set.communicator, config.compressor, backend, [own])
    buckets = bucket_bytes(accelerated=accelerated(), device=device) if config.micro_batches == 1 else None
    return dataclasses.replace(config, device=device, bucket_bytes=buckets)


def accumulation_steps(optimizer: Any, backward_passes: int) -> int:
    """Returns the number of micro-batches per update; sets Keras' accumulation if Horovod's argument requests it."""
    own = optimizer.gradient_accumulation_steps
    if backward_passes == 1:
        return int(own or 1)
    if own is not None:
        raise ConfigError(
            f"backward_passes_per_step={backward_passes} and the optimizer's own gradient_accumulation_steps={own} "
            "both set gradient accumulation: pass only one of them."
        )
    if optimizer.built:
        raise ConfigError(
            "backward_passes_per_step needs an optimizer that has not been built: its accumulators are created with "
            "the optimizer's other state. Create a new optimizer."
        )
    optimizer.gradient_accumulation_steps = backward_passes
    return backward_passes


def _on_torch() -> bool:
    return bool(keras.backend.backend() == "torch")


def _dtype(tensor: Any) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(keras.backend.standardize_dtype(tensor.dtype))
    return dtype
