"""A torch optimizer of which each rank has a slice of the state: the same weights, and the state of one process.

Run by ``test_sharded.py`` on 2 and 3 ranks. Optimizers are compared with themselves unsharded, bit for bit where they
work item by item, and with plain torch on the batches of all ranks.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import choros.torch as hvd
from choros.comm.members import KEPT_STEPS
from choros.errors import ConfigError, DriftError, MismatchError

STEPS = 20
Make = Callable[..., torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]
SGD: Make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM: Make = functools.partial(torch.optim.Adam, lr=0.01)


class Scaled(torch.optim.Adam):
    """A user's subclass that works item by item."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=2 * lr, amsgrad=True)


class Normed(torch.optim.Adam):
    """A user's subclass whose updates need whole parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(1 + parameter.grad.norm())
        super().step()
        return loss


NORMED: Make = functools.partial(Normed, lr=0.01)
BY_ITEM: list[Make] = [
    torch.optim.SGD,
    SGD,
    functools.partial(SGD, nesterov=True, maximize=True),
    functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    functools.partial(torch.optim.AdamW, lr=0.01),
    torch.optim.Adamax,
    torch.optim.NAdam,
    functools.partial(torch.optim.RAdam, lr=0.01),
    functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    torch.optim.Adadelta,
    torch.optim.Rprop,
    functools.partial(torch.optim.ASGD, lr=0.05),
    functools.partial(Scaled, lr=0.01),
]
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@pytest.fixture(autouse=True)
def _earlier_optimizers() -> None:
    gc.collect()


def build(seed: int = 0) -> torch.nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 17), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(17, 1))


def batch_of(step: int, rank: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(5, 7, generator=generator), torch.randn(5, 1, generator=generator)


def loss_of(model: torch.nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    return sum(torch.nn.functional.mse_loss(model(x), y) for x, y in batches) / len(batches)


def own(step: int) -> list[Batch]:
    return [batch_of(step)]


def everyones(step: int) -> list[Batch]:
    return [batch_of(step, rank) for rank in range(hvd.size())]


def train(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Callable[[int], list[Batch]] = own,
    steps: Sequence[int] = range(STEPS),
    after: Callable[[], object] = lambda: None,
) -> torch.nn.Module:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batches(step)).backward()
        optimizer.step()
        after()
    return model


def sharded(make: Make, model: torch.nn.Module, **given: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), shard_state=True, **given)


def assert_equal(model: torch.nn.Module, other: torch.nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=tolerance, atol=tolerance)


def assert_same_state(optimizer: Any, other: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(
        optimizer.state_dict()["state"], other.state_dict()["state"], rtol=tolerance, atol=tolerance
    )


def in_slices_and_whole(
    make: Callable[[], Any] = build, tolerance: float = 0.0
) -> Iterator[tuple[Any, Callable[..., torch.optim.Optimizer]]]:
    """Models to train with slices and without, and what distributes their optimizers; they end with the same values."""
    models = [make(), make()]
    for model, shard_state in zip(models, (True, False), strict=True):
        yield model, functools.partial(hvd.DistributedOptimizer, shard_state=shard_state)
    assert_equal(*models, tolerance)


def check(make: Make, *, tolerance: float = 0.0, **given: Any) -> None:
    """As unsharded, after the same steps."""
    model, reference = build(), build()
    optimizer, unsharded = (
        sharded(make, model, **given),
        hvd.DistributedOptimizer(make(reference.parameters()), **given),
    )
    assert_equal(train(model, optimizer), train(reference, unsharded), tolerance)
    assert_same_state(optimizer, unsharded, tolerance)


def case_optimizers_that_work_item_by_item() -> None:
    for make in BY_ITEM:
        for foreach in (False, True):
            check(make) if isinstance(make, functools.partial) and make.func is Scaled else check(
                functools.partial(make, foreach=foreach)
            )
        if getattr(make, "func", make) in FUSED:
            check(functools.partial(make, fused=True))
        plain = build()
        train(plain, make(plain.parameters()), everyones)
        model = build()
        # Rprop takes the sign of gradients, which are rounded in another order.
        assert_equal(train(model, sharded(make, model)), plain, 1e-4)


def case_optimizers_that_need_whole_parameters() -> None:
    for make in (NORMED, *([torch.optim.Adafactor] if hasattr(torch.optim, "Adafactor") else ())):
        check(make)
        plain, model = build(), build()
        train(plain, make(plain.parameters()), everyones)
        assert_equal(train(model, sharded(make, model)), plain, 1e-4)
    if hasattr(torch.optim, "Muon"):
        for model, distributed in in_slices_and_whole():
            matrices = [each for each in model.parameters() if each.ndim == 2]
            others = [each for each in model.parameters() if each.ndim < 2]
            optimizers = [distributed(torch.optim.Muon(matrices)), distributed(ADAM(others))]
            for step in range(STEPS):
                model.zero_grad()
                loss_of(model, own(step)).backward()
                for optimizer in optimizers:
                    optimizer.step()


def case_arguments() -> None:
    check(ADAM, compression=hvd.Compression.fp16)
    check(SGD, op=hvd.Sum)
    check(ADAM, gradient_predivide_factor=2.0)
    check(ADAM, groups=2, sparse_as_dense=True)


def case_several_backward_passes() -> None:
    for model, distributed in in_slices_and_whole():
        optimizer = distributed(ADAM(model.parameters()), backward_passes_per_step=2)
        for step in range(0, STEPS, 2):
            optimizer.zero_grad()
            for each in (step, step + 1):
                (loss_of(model, own(each)) / 2).backward()
            optimizer.step()


def case_groups_frozen_parameters_and_schedulers() -> None:
    def settings(model: Any) -> list[dict[str, Any]]:
        return [{"params": [*model[4].parameters()], "lr": 0.02}, {"params": [*model[2].parameters()]}]

    for make in (ADAM, NORMED):
        for created_before in (True, False):
            optimizers = []
            for model, distributed in in_slices_and_whole():
                optimizer = make(settings(model))
                if created_before:
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
                distributed(optimizer)
                if not created_before:
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
                model[2].requires_grad_(False)
                train(model, optimizer, steps=range(4), after=scheduler.step)
                model[2].requires_grad_(True)
                train(model, optimizer, steps=range(4, 8), after=scheduler.step)
                optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.03})
                train(model, optimizer, steps=range(8, 16))
                optimizers.append(optimizer)
            assert not torch.equal(model[0].weight, build()[0].weight)
            assert_same_state(*optimizers)


def case_closures_clipping_and_loss_scales() -> None:
    def with_closure(model: Any, optimizer: Any, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, own(step))
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0

    def clipped(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, own(step)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

    def clipped_in_closure(model: Any, optimizer: Any, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, own(step))
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        with optimizer.skip_synchronize():
            optimizer.step(closure)

    def scaled(model: Any, optimizer: Any, step: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer.zero_grad()
        infinite = step == 2 and hvd.rank() == 1
        scaler.scale(loss_of(model, own(step)) * (float("inf") if infinite else 1.0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    for make in (ADAM, NORMED):
        for one_step in (with_closure, clipped, clipped_in_closure, scaled):
            for model, distributed in in_slices_and_whole():
                optimizer = distributed(make(model.parameters()))
                for step in range(STEPS):
                    one_step(model, optimizer, step)


def case_memory_layouts_and_dtypes() -> None:
    def convolutions(dtype: torch.dtype) -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 9, 1)]
        return torch.nn.Sequential(*layers).to(dtype=dtype, memory_format=torch.channels_last)

    for make in (ADAM, NORMED):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for model, distributed in in_slices_and_whole(functools.partial(convolutions, dtype)):
                assert not model[0].weight.is_contiguous()
                scalar = torch.nn.Parameter(torch.ones((), dtype=dtype))
                empty = torch.nn.Parameter(torch.ones(0, dtype=dtype))
                optimizer = distributed(make([*model.parameters(), scalar, empty]))
                for step in range(5):
                    optimizer.zero_grad()
                    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
                    x = torch.randn((2, 3, 5, 5), generator=generator).to(dtype)
                    (model(x).square().mean() * scalar + empty.sum()).backward()
                    optimizer.step()
                model.register_buffer("scalar", scalar.detach())


@pytest.mark.parametrize("shard_state", [False, True])
def case_fused_updates_of_other_memory_layouts(shard_state: bool) -> None:
    """They read the memory of parameters and gradients in step, whatever their strides."""

    def trained(distributed: bool) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 9, 1)]
        model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=shard_state)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn((2 * hvd.size(), 3, 5, 5), generator=torch.Generator().manual_seed(step))
            rows = x[2 * hvd.rank() : 2 * hvd.rank() + 2] if distributed else x
            model(rows).square().mean().backward()
            optimizer.step()
        return model, optimizer.state_dict()

    (ours, state), (theirs, expected) = trained(True), trained(False)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for number, values in expected["state"].items():
        assert state["state"][number]["exp_avg"].stride() == values["exp_avg"].stride()
        torch.testing.assert_close(state["state"][number]["exp_avg"], values["exp_avg"], rtol=1e-3, atol=1e-6)


def case_parameters_that_move_to_another_dtype() -> None:
    for model, distributed in in_slices_and_whole():
        optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, steps=range(3))
        model.to(torch.float64)
        train(model, optimizer, lambda step: [tuple(each.double() for each in batch_of(step))], range(3, 6))


def case_autograd_detects_that_parameters_have_changed() -> None:
    model = build()
    optimizer = sharded(ADAM, model)
    loss = loss_of(model, own(0)) ** 2
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def case_what_users_see_around_a_step() -> None:
    """Hooks that were there before get the weights of all, and gradients stay those of this rank."""
    model = build()
    optimizer = ADAM(model.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    optimizer.zero_grad()
    loss_of(model, own(0)).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    torch.testing.assert_close(seen[0], [p.detach() for p in model.parameters()])
    torch.testing.assert_close(before, [p.grad for p in model.parameters()])

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    twice = sharded(functools.partial(Twice, lr=0.1), model)

    def closure() -> Any:
        model.zero_grad()
        loss = loss_of(model, own(0))
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match="evaluates its closure more than once"):
        twice.step(closure)


def case_hooks_that_change_gradients_before_a_step() -> None:
    """They clip the gradients of all ranks; with a closure there are none yet."""
    seen: list[float] = []
    for make in (SGD, functools.partial(torch.optim.Adafactor, lr=0.05)):
        for model, distributed in in_slices_and_whole():
            optimizer = distributed(make(model.parameters()))

            def clip(*_: Any, model: Any = model) -> None:
                seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

            train(model, optimizer, steps=range(2))
            handle = optimizer.register_step_pre_hook(clip)
            train(model, optimizer, steps=range(2, 5))
            handle.remove()
            train(model, optimizer, steps=range(5, 7))
            optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.02))

            def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, own(7))
                loss.backward()
                return loss

            optimizer.step(closure)
        in_slices, whole = seen[:3], seen[3:]
        assert in_slices == whole
        assert all(norm > 0.05 for norm in whole)
        seen.clear()


def case_process_sets() -> None:
    """Each rank is in one of two sets: one trains alone, others together."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0], [*range(1, hvd.size())])]
    for model, distributed in in_slices_and_whole():
        optimizer = distributed(ADAM(model.parameters()), process_set=sets[min(hvd.rank(), 1)])
        train(model, optimizer)
        assert optimizer.state_dict()["state"][0]["step"] == STEPS
    del optimizer
    for each in sets:
        hvd.remove_process_set(each)


def state_bytes(optimizer: Any) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )


def case_each_rank_has_its_part_of_the_state() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 301), torch.nn.Linear(301, 1))
    total = sum(each.numel() for each in model.parameters())
    for make, per_item in ((ADAM, 8), (SGD, 4), (torch.optim.Adagrad, 4)):
        optimizer = sharded(make, model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
        assert math.isclose(state_bytes(optimizer), per_item * total / hvd.size(), rel_tol=0.01)
        assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]


def saved_by_rank_0(optimizer: Any) -> bytes:
    """The other ranks call nothing: they answer in ``broadcast_object``."""
    if hvd.rank() == 0:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        return hvd.broadcast_object(file.getvalue())
    return hvd.broadcast_object(None)


def loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def case_saved_by_one_rank_and_loaded_anywhere() -> None:
    for make in (ADAM, SGD, torch.optim.Adagrad, torch.optim.Rprop, NORMED):
        model, reference = build(), build()
        optimizer, unsharded = sharded(make, model), hvd.DistributedOptimizer(make(reference.parameters()))
        train(model, optimizer, steps=range(8))
        train(reference, unsharded, steps=range(8))
        saved = loaded(saved_by_rank_0(optimizer))
        torch.testing.assert_close(saved, unsharded.state_dict(), rtol=0, atol=0)
        weights = copy.deepcopy(model.state_dict())
        train(reference, unsharded, steps=range(8, 16))
        # In one process, and on all ranks: by one that was used, too.
        plain = build()
        plain.load_state_dict(weights)
        alone = make(plain.parameters())
        alone.load_state_dict(copy.deepcopy(saved))
        assert_equal(train(plain, alone, everyones, range(8, 16)), reference, 1e-4)
        train(model, optimizer, steps=range(5))
        for again in (optimizer, None):
            another = model if again else build()
            another.load_state_dict(weights)
            given = again or sharded(make, another)
            given.load_state_dict(copy.deepcopy(saved))
            assert_same_state(given, _Holding(saved))
            assert_equal(train(another, given, steps=range(8, 16)), reference)
            assert_same_state(given, unsharded)
        # Loaded before it is distributed; and what was saved on 3 ranks, on 2.
        another = build()
        another.load_state_dict(weights)
        given = make(another.parameters())
        given.load_state_dict(copy.deepcopy(saved))
        hvd.DistributedOptimizer(given, shard_state=True)
        assert_equal(train(another, given, steps=range(8, 16)), reference)


class _Holding:
    """What has a state."""

    def __init__(self, state: Any) -> None:
        self.state_dict = lambda: state


def case_saved_on_all_ranks_is_loaded_on_two() -> None:
    model = build()
    optimizer = sharded(ADAM, model)
    train(model, optimizer, steps=range(5))
    saved, weights = loaded(saved_by_rank_0(optimizer)), copy.deepcopy(model.state_dict())
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
    for each, distributed in in_slices_and_whole():
        each.load_state_dict(weights)
        again = distributed(ADAM(each.parameters()), process_set=pair)
        again.load_state_dict(copy.deepcopy(saved))
        if pair.included():
            train(each, again, steps=range(5, 10))
    del again
    if hvd.size() > 2:
        hvd.remove_process_set(pair)


def case_copies_are_plain_optimizers() -> None:
    model = build()
    optimizer = sharded(ADAM, model)
    train(model, optimizer, steps=range(3))
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(each) is torch.optim.Adam
        assert_same_state(each, optimizer)
        each.step()
    own_state = {id(value) for state in optimizer.state.values() for value in state.values()}
    optimizer.state_dict()
    assert own_state == {id(value) for state in optimizer.state.values() for value in state.values()}


def case_state_that_one_rank_has_loaded_is_broadcast() -> None:
    for make in (ADAM, torch.optim.Adagrad, NORMED):
        for used in (False, True):
            trained = build()
            before = make(trained.parameters())
            train(trained, before, everyones, range(4))
            model, reference = build(), build()
            optimizer = sharded(make, model)
            if used:
                train(model, optimizer, steps=range(3))
            if hvd.rank() == 0:
                model.load_state_dict(trained.state_dict())
                optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
                optimizer.param_groups[0]["lr"] = 0.005
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.005
            assert_same_state(optimizer, before)
            reference.load_state_dict(trained.state_dict())
            unsharded = hvd.DistributedOptimizer(make(reference.parameters(), lr=0.005))
            unsharded.load_state_dict({**unsharded.state_dict(), "state": copy.deepcopy(before.state_dict()["state"])})
            assert_equal(train(model, optimizer), train(reference, unsharded))
            # Slices stay where they are; settings are sent.
            if hvd.rank() == 1:
                optimizer.param_groups[0]["lr"] = 0.25
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            assert optimizer.param_groups[0]["lr"] == 0.25
            assert_same_state(optimizer, unsharded)


def case_state_of_unused_optimizers_is_created() -> None:
    for make in (ADAM, torch.optim.RMSprop, torch.optim.Adadelta):
        model, reference = build(), build()
        optimizer, unsharded = sharded(make, model), hvd.DistributedOptimizer(make(reference.parameters()))
        assert optimizer.state_dict()["state"] == {}
        for each in (optimizer, unsharded):
            hvd.broadcast_optimizer_state(each, root_rank=0)
        assert_same_state(optimizer, unsharded)
        assert_equal(train(model, optimizer), train(reference, unsharded))


def counts() -> list[int]:
    """How many batches each rank has."""
    return [3, 7, 5][: hvd.size()]


def case_parameters_that_differ_at_the_start() -> None:
    """Slices would mix them."""
    parameter = torch.nn.Parameter(torch.full((70,), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([parameter]), shard_state=True)
    parameter.sum().backward()
    with pytest.raises(DriftError, match="before step 1, ranks have different values of 1 of 1"):
        optimizer.step()


def case_settings_that_differ() -> None:
    """Parameters are the same: each rank gives the others its items."""
    model = build()
    optimizer = sharded(ADAM, model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.step(1.0)
    with pytest.raises(DriftError, match=r"after step 2, .* 'lr of group 0'.*ReduceLROnPlateau"):
        train(model, optimizer, after=lambda: scheduler.step(2.0 * hvd.rank()))
    lr = 0.01 * (1 + hvd.rank())
    with pytest.raises(DriftError, match=r"before step 1, .*'lr of group 0'"):
        train(model, sharded(functools.partial(torch.optim.Adam, lr=lr), model))
    for name, setting in {"lr": torch.tensor(lr), "betas": (0.9, 0.99 * lr)}.items():
        model = build()
        with pytest.raises(DriftError, match=rf"before step 1, .*'{name} of group 0'"):
            train(model, sharded(functools.partial(torch.optim.Adam, **{name: setting}), model))


def case_a_state_that_one_rank_alone_has_loaded() -> None:
    refused = functools.partial(pytest.raises, ConfigError, match=r"ranks \[0\] have loaded the optimizer's state")
    model = build()
    optimizer = sharded(ADAM, model)
    state = copy.deepcopy(train(model, optimizer) and optimizer.state_dict())
    for loads_first in (False, True):
        optimizer = ADAM(model.parameters())
        if not loads_first:
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
        if hvd.rank() == 0:
            optimizer.load_state_dict(state)
        if loads_first:
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
        with refused():
            train(model, optimizer)
    optimizer = sharded(ADAM, model)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, steps=range(3))
    state = optimizer.state_dict()
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    with refused():
        train(model, optimizer, steps=range(100))


def case_join() -> None:
    for make, clips in ((ADAM, False), (ADAM, True), (NORMED, False)):
        models, references = ([build(seed) for seed in range(2)] for _ in range(2))
        results = []
        for nets, shard_state in ((models, True), (references, False)):
            optimizers = [hvd.DistributedOptimizer(make(net.parameters()), shard_state=shard_state) for net in nets]
            schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
            for step in range(counts()[hvd.rank()]):
                for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True):
                    optimizer.zero_grad()
                    loss_of(net, own(step)).backward()
                    if clips:
                        optimizer.synchronize()
                        hvd.allreduce(torch.ones(()), name="loss")
                        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
                    scheduler.step()
                if hvd.rank() == 1 and shard_state:
                    optimizers[0].state_dict()
            assert hvd.join() == 1
            results.append(
                [optimizers[0].param_groups[0]["lr"], *(copy.deepcopy(each.state_dict()) for each in optimizers)]
            )
            for net, optimizer in zip(nets, optimizers, strict=True):
                train(net, optimizer, steps=range(10, 13))
            del optimizers, schedulers, optimizer, scheduler
            gc.collect()
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
        for model, reference in zip(models, references, strict=True):
            assert_equal(model, reference)


def case_ranks_that_never_have_a_batch() -> None:
    for model, distributed in in_slices_and_whole():
        optimizer = distributed(ADAM(model.parameters()))
        if hvd.rank() == 1:
            train(model, optimizer)
        assert hvd.join() == 1
        assert optimizer.state_dict()["state"][0]["step"] == STEPS
        del optimizer
        gc.collect()


def case_joined_ranks_and_gradients_that_the_user_reduces() -> None:
    model, reference = build(), build()
    optimizer = sharded(SGD, model)
    plain = SGD(reference.parameters())
    for step in range(counts()[hvd.rank()]):
        optimizer.zero_grad()
        loss_of(model, own(step)).backward()
        for parameter in model.parameters():
            hvd.allreduce_(parameter.grad, op=hvd.Sum)
        optimizer._choros_gradient_hook.abandon_step()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert hvd.join() == 1
    for step in range(max(counts())):
        having = [rank for rank, count in enumerate(counts()) if step < count]
        plain.zero_grad()
        (loss_of(reference, [batch_of(step, rank) for rank in having]) * len(having)).backward()
        plain.step()
    assert_equal(model, reference, 1e-4)


def case_groups_that_users_append_themselves() -> None:
    for model, distributed in in_slices_and_whole():
        optimizer = distributed(ADAM(model[4].parameters()))
        train(model, optimizer, steps=range(2))
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [*model[0].parameters()]})
        model.zero_grad()
        train(model, optimizer, steps=range(2, 5))


class Embedded(torch.nn.Module):
    """A table whose gradient is sparse, and a dense layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(90, width, sparse=True)
        self.dense = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table(x)).square().mean()


def words(step: int) -> torch.Tensor:
    """Some occur twice, some on several ranks."""
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    return torch.randint(0, 90, (12,), generator=generator)


@torch.sparse.check_sparse_tensor_invariants(enable=False)
def case_sparse_gradients() -> None:
    def both(kind: Any, **settings: Any) -> Callable[[Embedded], list[Any]]:
        return lambda net: [kind(net.parameters(), **settings)]

    def tables(net: Embedded) -> list[Any]:
        return [torch.optim.SparseAdam([net.table.weight], lr=0.1), ADAM(net.dense.parameters())]

    for make in (
        both(torch.optim.SGD, lr=0.1),
        both(torch.optim.SGD, lr=0.1, momentum=0.5),
        both(torch.optim.Adagrad, lr=0.1),
        tables,
    ):
        for as_dense in (False, True):
            for joins in (False, True):
                states = []
                for net, distributed in in_slices_and_whole(functools.partial(Embedded, 5), 1e-6):
                    optimizers = [distributed(each, sparse_as_dense=as_dense) for each in make(net)]
                    for step in range(counts()[hvd.rank()] if joins else 6):
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        net(words(step)).backward()
                        for optimizer in optimizers:
                            optimizer.step()
                    if joins:
                        assert hvd.join() == 1
                    states.append([each.state_dict()["state"] for each in optimizers])
                    del optimizers, optimizer
                    gc.collect()
                torch.testing.assert_close(*map(dense, states), rtol=1e-6, atol=1e-6)


def dense(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.to_dense() if value.is_sparse else value
    if isinstance(value, dict):
        return {key: dense(each) for key, each in value.items()}
    return [dense(each) for each in value] if isinstance(value, list) else value


def case_adam_does_not_take_sparse_gradients() -> None:
    net = Embedded(5)
    optimizer = sharded(ADAM, net)
    net(words(0)).backward()
    with pytest.raises(ConfigError, match=r"Adam does not support sparse gradients: use torch\.optim\.SparseAdam"):
        optimizer.step()


class Failing(torch.optim.SGD):
    """Fails at times."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


def case_a_step_that_has_failed_on_all_ranks() -> None:
    for use in (
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    ):
        model, reference = build(), build()
        optimizer = sharded(functools.partial(Failing, lr=0.1, momentum=0.9), model)
        train(model, optimizer, steps=range(2))
        Failing.fails = True
        with pytest.raises(ArithmeticError):
            train(model, optimizer, steps=[2])
        Failing.fails = False
        use(model, optimizer)
        assert len(optimizer.param_groups[0]["params"]) == 6
        train(model, optimizer, steps=range(3, 6))
        train(reference, hvd.DistributedOptimizer(SGD(reference.parameters(), weight_decay=0)), steps=[0, 1, 3, 4, 5])
        assert_equal(model, reference)


def case_dropped_optimizers_are_freed() -> None:
    def train_and_drop() -> weakref.ref[Any]:
        dropped = build()
        train(dropped, sharded(ADAM, dropped), steps=range(2))
        return weakref.ref(dropped[0].weight)

    weight = train_and_drop()
    model = build()
    optimizer = sharded(SGD, model)
    gc.collect()
    assert weight() is not None  # other ranks may ask for its state
    train(model, optimizer, steps=range(KEPT_STEPS + 1))
    gc.collect()
    assert weight() is None


def case_a_rank_saves_while_others_have_dropped_it() -> None:
    def main() -> Any:
        model = build()
        optimizer = sharded(ADAM, model)
        train(model, optimizer, steps=range(3))
        return optimizer.state_dict() if hvd.rank() == 0 else None

    saved = main()
    gc.collect()
    hvd.barrier()
    if hvd.rank() == 0:
        assert saved["state"][0]["step"] == 3


def case_an_optimizer_that_other_ranks_do_not_have() -> None:
    model = build()
    optimizer = sharded(ADAM, model)
    train(model, optimizer, steps=range(2))
    only = hvd.DistributedOptimizer(SGD(build().parameters()), shard_state=hvd.rank() == 0)
    if hvd.rank() == 0:
        only._choros_slices.is_whole = False
        with pytest.raises(MismatchError, match="rank 1 has no such state"):
            only.state_dict()
    hvd.barrier()


class Odd(torch.optim.SGD):
    """Keeps what cannot be sent, or read by other ranks."""

    values = (lambda: None, slice(3))

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = self.values[hvd.rank() % 2]
        return super().step(closure)


def case_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with pytest.raises(ConfigError, match="shard_state=True and op=Adasum"):
        sharded(SGD, model, op=hvd.Adasum)
    with pytest.raises(ConfigError, match="LBFGS"):
        sharded(torch.optim.LBFGS, model)
    optimizer = sharded(functools.partial(Odd, lr=0.1), model)
    train(model, optimizer, steps=range(1))
    with pytest.raises(ConfigError, match="leave shard_state out"):
        optimizer.state_dict()
    hvd.barrier()
    members = hvd.add_process_set([0])
    if hvd.rank() == 0:
        monkeypatch.setattr(members.communicator, "elastic", True)
        with pytest.raises(ConfigError, match="not supported for some ranks of an elastic job"):
            sharded(SGD, model, process_set=members)
    hvd.remove_process_set(members)
