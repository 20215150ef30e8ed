"""The reducer of gradients over the ranks, for Keras optimizers of both programming models and TensorFlow's loops.

::

    apply(gradients) ─► OptimizerReducer.reduce ─┬─ GradientReducer, through one host call; it averages, or sums in a
                 tape.gradient(loss, sources) ─┘ │  strategy's custom loop (on torch also during the backward pass of
                                                 │  fit, or on its device)
                                                 └─ replicas that are devices of one process: the strategy's sum
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import keras
import numpy as np

from choros.comm import Array, ProcessSet, Reduction, global_process_set
from choros.comm.joining import Participation
from choros.errors import ConfigError
from choros.parallel.identical import Comparison, check_identical
from choros.parallel.ops import grouped_allreduce
from choros.parallel.reduce.gradients import Gradient, GradientKind, GradientLayout, numbered, variables_of
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import BackwardExchange, are_replaceable
from choros.parallel.structure import with_items
from choros.settings import current
from choros.training.host_gradients import (
    dtype_of,
    host_call,
    is_embedding,
    is_overwritten,
    keras_arrays,
    layout_entry,
    scaled,
    tell_host,
    tensor_of,
)
from choros.training.keras_internals.fit import sync_jax_state
from choros.training.keras_internals.models import read_gathered_rows_only
from choros.training.sliced_state import ELSEWHERE, Slices
from choros.training.variables import overwrite, value_of
from choros.training.weighting import correction, current_step, warn_of_unseen
from choros.training.whole_state import WholeState

if keras.backend.backend() == "tensorflow":  # before a step is traced
    read_gathered_rows_only()


@final
class OptimizerReducer:
    """Reduces one Keras optimizer's gradients, or tapes', and knows which ranks keep its state (``None``: all).
    ``configure`` is called late: a strategy wraps optimizers that are still being constructed. ``shard_state``: whether
    each rank has a slice of the state, ``None`` if chorosrun says it. In a prepared step
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
        shard_state: bool | None = None,
        advice: str = "",
    ) -> None:
        self.state_owner = state_owner
        self._shard_state = shard_state
        #: That of one process, once the optimizer is built, if each rank has a slice of it.
        self.state: WholeState | None = None
        #: The model that is trained, which an optimizer's state, kept for other ranks, must not keep.
        self.model: Callable[[], Any] = lambda: None
        #: What commits the state of this optimizer, if anything does (``commit_together``).
        self.commit: Callable[[], Callable[[], None] | None] = lambda: None
        self._configure = configure
        self._sparse_as_dense = sparse_as_dense
        self.op = op
        self._sum_over_devices = sum_over_devices
        self._backward: BackwardExchange | None = None
        self._advice = advice
        self._scale_local = scale_local_gradients
        self.local: list[Any] = []
        #: Whether a comparison is due after the update, in a step that is being compiled too; and by which reducer.
        self._due: Any = None
        #: A number that the reduction into slices has returned, before which nothing that follows may run.
        self.ordering: Any = None
        #: Whether this update is the first of one of its variables, as the host says; and the indices of all so far.
        self._is_first: Any = False
        self.begun: frozenset[int] = frozenset()
        self._last: GradientReducer | None = None

    @cached_property
    def reducer(self) -> GradientReducer:
        """The reducer of host arrays, or of tensors on torch."""
        config = self._configure()
        if self._is_sharded:  # what is reduced during the backward pass is received whole
            config = dataclasses.replace(config, bucket_bytes=None)
        reducer = GradientReducer(config)
        reducer.correction = correction
        return reducer

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that make updates together."""
        return self.reducer.process_set

    @property
    def active(self) -> bool:
        """Whether there are, or may be, others."""
        return self.reducer.active

    @property
    def slices(self) -> Slices | None:
        """This rank's slices of the optimizer's state, if it has some."""
        return None if self.state is None else self.state.slices

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
    def _is_sharded(self) -> bool:
        if self._shard_state is None:
            return current().shard_state and self.state_owner is None
        return self._shard_state

    @property
    def divides_state(self) -> bool:
        """Whether each rank is to have a slice of the optimizer's state, as there are others; an error if it cannot."""
        if not self._is_sharded or not self.active:
            return False
        if self._sum_over_devices is not None:
            raise ConfigError(
                "shard_state=True is not possible here: replicas that are devices of one process share its memory: "
                "start a process for each."
            )
        return True

    def synchronize(self) -> None:
        """Gives the variables of the ``model`` that is trained the values that JAX's trainer has during an epoch."""
        if (model := self.model()) is not None:
            sync_jax_state(model)

    @property
    def reduces_all(self) -> bool:
        """Whether all gradients are reduced over all ranks."""
        return self.process_set is global_process_set and not self.local and not self._is_sharded

    def shared(self, variables: Sequence[Any]) -> Sequence[Any]:
        """The ``variables`` whose gradients are reduced."""
        shared = [each for each in variables if not is_overwritten(each)]
        return [each for each in shared if not _is_among(each, self.local)] if self.local else shared

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        known: Sequence[Any],
        micro_batches: Any = 0,
        examples: Any = None,
    ) -> list[Any]:
        """Reduces this rank's gradients for the update; ``known``: all variables of which there may be gradients;
        ``micro_batches``: the calls of ``apply`` before this one.
        """
        gradients = list(gradients)
        self._due = self.ordering = None
        if not gradients:  # all weights are frozen: ranks without rows do not come
            return gradients
        if self._sparse_as_dense:
            adapter = keras_arrays()
            gradients = [adapter.to_dense(g, tuple(v.shape)) for g, v in zip(gradients, variables, strict=True)]
        reducer = self.reducer
        if self.op is not None and self.op() is Reduction.SUM:
            if self._sum_over_devices is not None:
                return self._sum_over_devices(gradients)
            reducer = self._summing
        config = reducer.config
        # After shutdown(), each rank would train apart.
        if config.process_set.epoch and len(config.process_set.ranks) > 1:
            config.process_set.check_registered("an update of a distributed optimizer")
        step = current_step()
        of_all_ranks = step is not None and step.of_all_ranks
        if of_all_ranks or not reducer.active:
            factor = 1 if config.average_micro_batches else config.micro_batches
            if of_all_ranks and config.op is Reduction.SUM:
                factor *= config.process_set.communicator.size
            pairs = zip(gradients, variables, strict=True)
            if factor != 1:
                gradients = [None if g is None else scaled(g, factor, v) for g, v in pairs]
            return gradients if self.slices is None else self.slices.cut(gradients, variables)
        if step is not None:
            warn_of_unseen(step)
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        local = {index for index in given if _is_among(variables[index], self.local)} if self.local else set()
        overwritten = {index for index in given if is_overwritten(variables[index])}
        gradients = _with_largest(gradients, sorted(overwritten - local), config.process_set)
        apart = local | overwritten
        shared = [index for index in given if index not in apart]
        own, trained = [gradients[i] for i in shared], [variables[i] for i in shared]
        layout = numbered(tuple(map(self._layout, own, trained)), trained, self.shared(known))
        reduced = self._reduce(reducer, own, trained, layout, micro_batches, examples)
        # Keras divides by the number of micro-batches, as for reduced gradients.
        factor = 1 if config.average_micro_batches else config.micro_batches
        divisor = config.process_set.communicator.size if self._scale_local else 1
        for index in local - overwritten:
            gradients[index] = scaled(gradients[index], factor / divisor, variables[index])
        gradients = with_items(gradients, shared, reduced)
        return gradients if self.slices is None else self.slices.placed(gradients, variables)

    @property
    def is_due(self) -> bool:
        """Whether a comparison is due after the update, or may be when the step that is being compiled runs."""
        if self.state_owner is not None or self._due is None:  # all have just received the owner's values
            return False
        return keras_arrays().is_symbolic([self._due]) or bool(self._due)

    def _begin(self, variables: Sequence[Any]) -> bool:
        """Notes an update in slices of these variables; returns whether it is the first of any of them."""
        before = self.begun
        if self.slices is not None:
            self.begun = before.union(map(self.slices.index_of, variables))
        return self.begun != before

    def check_start(self, variables: Sequence[Any]) -> None:
        """Before their first update in slices, checks that all ranks have the same variables: each would give others
        its own items, and no later comparison could tell.
        """
        names = [getattr(variable, "path", variable.name) for variable in variables]

        def check(hosts: Sequence[Any]) -> None:
            divergence = "warn" if self.reducer.divergence == "warn" else "error"
            comparison = Comparison(1, 1, divergence, before=True)
            check_identical(names, hosts, comparison, advice=self._advice, process_set=self.process_set)

        _call_if(self._is_first, check, list(map(value_of, variables)))
        self._is_first = False

    def compare(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """At times checks that all ranks have these values after the update; on JAX the caller assigns the healed."""
        due, reducer, values = self._due, self._last, list(values)
        if reducer is None or not self.is_due:
            return values
        self._due = None
        shared = [index for index, variable in enumerate(variables) if not _is_among(variable, self.local)]
        names = [getattr(variables[index], "path", variables[index].name) for index in shared]
        own = [values[index] for index in shared]
        adapter = keras_arrays()
        in_place = keras.backend.backend() != "jax"
        healed: dict[int, Any] = {}

        def assign(index: int, host: Array) -> None:
            if in_place:
                overwrite(variables[shared[index]], host)
            else:
                healed[index] = host

        def check(arrays: Sequence[Any]) -> None:
            if reducer.due is not None:
                check_identical(
                    names, arrays, reducer.due, advice=self._advice, process_set=self.process_set, assign=assign
                )

        if in_place or reducer.divergence != "heal" or not adapter.is_symbolic([due]):
            _call_if(due, check, own)
            given = [adapter.from_host(host, own[index]) for index, host in healed.items()]
            return with_items(values, [shared[index] for index in healed], given)

        def healing(hosts: Sequence[Array]) -> Sequence[Array]:
            healed.clear()
            check(hosts)
            return [healed.get(index, host) for index, host in enumerate(hosts)]

        specs = [adapter.spec(value) for value in own]
        results = keras.ops.cond(due > 0, lambda: adapter.host_call(healing, own, specs), lambda: own)
        return with_items(values, shared, results)

    def _reduce(
        self,
        reducer: GradientReducer,
        gradients: list[Any],
        variables: list[Any],
        layout: GradientLayout,
        micro_batches: Any,
        examples: Any,
    ) -> list[Any]:
        config, self._last, step = reducer.config, reducer, current_step()
        if examples is None:
            examples = 1 if step is None else step.examples
        if _on_torch() and (config.bucket_bytes is not None or config.device is not None):
            if config.bucket_bytes is not None:
                # Hooks send full buckets in ``loss.backward()``, from the second step on: ``apply`` is too late.
                parameters = [variable.value for variable in variables]
                if self._backward is None:
                    self._backward = BackwardExchange(self.reducer, parameters, examples=_step_examples)
                reduced = self._backward.reduce(parameters, gradients)
            else:
                exchange = (int(micro_batches) + 1) % config.micro_batches == 0
                reduced = reducer.reduce(gradients, examples=int(examples), exchange=exchange, layout=layout)
            self._due, self._is_first = reducer.due is not None, self._begin(variables)
            return reduced
        if config.bucket_bytes is not None:
            return self._reduce_buckets(reducer, gradients, layout, examples)

        def on_host(hosts: Sequence[Array], own: list[Gradient], out: Sequence[Array] | None) -> list[Gradient]:
            done, count = map(int, hosts)
            exchange = (done + 1) % config.micro_batches == 0
            reducer.correction = functools.partial(correction, step)  # of this trace
            return reducer.reduce(own, examples=count, exchange=exchange, layout=layout, out=out)

        numbers, flag = (micro_batches, examples), lambda: reducer.due is not None
        if (slices := self.slices) is not None:
            return self._reduce_slices(
                slices, on_host, numbers, gradients, layout, lambda: bool(reducer.due) + 2 * self._begin(variables)
            )
        keeps = reducer.may_repeat or (_on_torch() and not are_replaceable(gradients, [v.value for v in variables]))
        reduced, self._due = host_call(on_host, numbers, gradients, layout, config.device, flag, keeps=keeps)
        return reduced

    def _reduce_slices(
        self,
        slices: Slices,
        reduce: Callable[[Sequence[Array], list[Gradient], Sequence[Array] | None], list[Gradient]],
        numbers: Sequence[Any],
        gradients: list[Any],
        layout: GradientLayout,
        flags: Callable[[], int],
    ) -> list[Any]:
        """Returns what this rank receives of the sums."""
        rank = slices.rank
        own = {n: each.of_rank(rank) for n, each in enumerate(layout) if not each.ranges or each.items(rank)}

        def on_host(hosts: Sequence[Array], given: list[Gradient], out: Sequence[Array] | None) -> list[Gradient]:
            targets = None
            if out is not None:
                of_own = dict(zip(own, out, strict=True))
                targets = [of_own.get(index, given[index].reshape(-1)[:0]) for index in range(len(layout))]
            results = reduce(hosts, given, targets)
            return [results[index] for index in own]

        device = self.reducer.config.device
        reduced, number = host_call(on_host, numbers, gradients, layout, device, flags, tuple(own.values()), keeps=True)
        self.ordering, self._due, self._is_first = number, number % 2, number // 2
        return with_items([ELSEWHERE] * len(gradients), own, reduced)

    def _layout(self, gradient: Any, variable: Any) -> Any:
        layout, slices = layout_entry(gradient, variable), self.slices
        is_cut = slices is not None and slices.by_item and slices.is_divided(variable) and not is_embedding(variable)
        if is_cut and layout.sparse:
            raise ConfigError(
                f"shard_state=True: {variable.path} has a gradient of rows, and is not cut between rows, as the tables "
                "of keras.layers.Embedding are: use this layer, or pass sparse_as_dense=True."
            )
        return layout if slices is None else layout._replace(ranges=slices.ranges_of(variable))

    def _reduce_buckets(
        self, reducer: GradientReducer, gradients: list[Any], layout: GradientLayout, examples: Any
    ) -> list[Any]:
        """One host call per bucket, by side effects in one order; in an elastic job the last returns all gradients."""
        reduced, flag, keeps = list(gradients), lambda: reducer.due is not None, reducer.may_repeat
        buckets, everything, device = reducer.plan(layout), tuple(range(len(layout))), reducer.config.device
        step = current_step()
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
                    reducer.correction = functools.partial(correction, step)
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
            results, self._due = host_call(on_host, (examples,), own, part, device, flag, results_layout, keeps=keeps)
            reduced = with_items(reduced, returned, results)
        return reduced

    def reduce_early(self, known: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Reduces gradients of micro-batches now, on all ranks between two steps; returns what is to be accumulated."""
        found = self.reducer.reduce_early()
        return [pair for each in found.items() for pair in self._accumulated(self.shared(known), *each)]

    def _accumulated(self, known: Sequence[Any], layout: GradientLayout, reduced: list[Gradient]) -> list[Any]:
        variables, tensors = variables_of(layout, known), list(map(tensor_of, reduced))
        pairs: list[tuple[Any, Any]] = []
        if self.slices is None:
            pairs += zip(variables, tensors, strict=True)
        else:
            for pieces in self.slices.placed(tensors, variables):
                pairs += [(self.slices.own[piece], tensor) for piece, tensor in (pieces or {}).items()]
        return [(each, keras_arrays().to_dense(gradient, tuple(each.shape))) for each, gradient in pairs]

    def participation(
        self,
        variables: Sequence[Any],
        on_update: Callable[[list[Gradient], Sequence[Any]], None] | None = None,
        on_early: Callable[[list[Any]], None] = lambda _: None,
    ) -> Participation:
        """As ``GradientReducer.participation``; sparse ones may come, ``on_update`` gets those of others' steps, and
        ``on_early`` what ``reduce_early`` returns on others.
        """

        def update(layout: GradientLayout, reduced: list[Gradient]) -> None:
            self.ordering, self._is_first = None, False
            if on_update is not None:
                trained = variables_of(layout, variables)
                self._is_first = self._begin(trained)
                on_update(reduced, trained)

        def early(layout: GradientLayout, reduced: list[Gradient]) -> None:
            on_early(self._accumulated(variables, layout, reduced))

        slices = self.slices
        ranges = [() if slices is None else slices.ranges_of(each) for each in variables]
        dense = [GradientKind(tuple(v.shape), dtype_of(v), own) for v, own in zip(variables, ranges, strict=True)]
        sparse: list[GradientLayout] = []
        if keras.backend.backend() == "tensorflow" and not self._sparse_as_dense and any(map(is_embedding, variables)):
            for index_dtype in (np.dtype(np.int32), np.dtype(np.int64)):
                rows = [each._replace(index_dtype=index_dtype) for each in dense]
                pairs = zip(variables, dense, rows, strict=True)
                sparse += [tuple(of_rows if is_embedding(v) else each for v, each, of_rows in pairs)]
        return self.reducer.participation(tuple(dense), update, sparse, early)


def _with_largest(gradients: list[Any], indices: Sequence[int], process_set: ProcessSet) -> list[Any]:
    """``gradients`` with the largest values of all ranks at ``indices``; Keras takes those of micro-batches, too."""
    if not indices:
        return gradients
    own = [keras.ops.stop_gradient(gradients[index]) for index in indices]
    return with_items(gradients, indices, grouped_allreduce(own, Reduction.MAX, process_set=process_set))


def _is_among(variable: Any, variables: Sequence[Any]) -> bool:
    return any(variable is each for each in variables)  # they compare by value


def _call_if(due: Any, function: Callable[[Sequence[Any]], None], values: Sequence[Any]) -> None:
    """Calls ``function`` with the ``values`` if ``due``: now, or whenever the compiled step runs."""
    if due is False:  # also in a compiled step, which has reduced the gradients itself
        return
    if keras_arrays().is_symbolic([due]):
        keras.ops.cond(due > 0, lambda: tell_host(function, values), lambda: keras.ops.zeros((), "int32"))
    elif due:
        function(values)


def _step_examples() -> Any:
    """The number of examples in the batch; ``None`` outside of steps, whose backward passes involve no other rank."""
    step = current_step()
    return None if step is None else step.examples


def _on_torch() -> bool:
    return bool(keras.backend.backend() == "torch")
