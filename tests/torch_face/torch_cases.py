"""The PyTorch API on two ranks: training equals plain torch on the global batch; see ``test_torch_face.py``.

Training cases run with and without overlap, in buckets of a few hundred bytes.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import choros.torch as hvd
from choros.errors import ConfigError, MismatchError
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import BackwardExchange
from choros.settings import current

FEATURES, CLASSES, BATCH, STEPS = 6, 3, 8, 5
Make = Callable[..., torch.optim.Optimizer]
SGD: Make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM: Make = functools.partial(torch.optim.Adam, lr=0.01)


class Limits(NamedTuple):
    least: float
    most: float


@contextmanager
def overlapping(overlap: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("choros.settings._config", replace(current(), overlap=overlap))
        patch.setattr("choros.parallel.reduce.plan._BUCKET_BYTES", 256)
        yield


def with_and_without_overlap(case: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(case)
    def twice() -> None:
        for overlap in (False, True):
            with overlapping(overlap):
                case()

    return twice


def build(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, CLASSES))


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, FEATURES)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


def part(batch: tuple[torch.Tensor, torch.Tensor], rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's half of a batch."""
    half = slice(*hvd.shard_range(BATCH, hvd.rank() if rank is None else rank, 2))
    return batch[0][half], batch[1][half]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model: torch.nn.Module, optimizer: Any, data: Sequence[Any], *, set_to_none: bool = True) -> None:
    for batch in data:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()


def trained_by_torch(make: Make = SGD) -> torch.nn.Module:
    """Returns a model trained by plain torch on the global batches."""
    model = build()
    train(model, make(model.parameters()), batches())
    return model


def assert_same(model: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-5) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [part(batch) for batch in batches()]


@with_and_without_overlap
def case_sgd_and_adam() -> None:
    for make, set_to_none in itertools.product((SGD, ADAM), (True, False)):
        model = build()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters())
        train(model, optimizer, parts(), set_to_none=set_to_none)
        assert_same(model, trained_by_torch(make))


@with_and_without_overlap
def case_accumulated_gradients() -> None:
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=2)
    plain = SGD(reference.parameters())
    for two in zip(batches(6)[::2], batches(6)[1::2], strict=True):
        for net, opt, own in ((model, optimizer, part), (reference, plain, lambda batch: batch)):
            opt.zero_grad()
            for batch in two:
                (loss_of(net, own(batch)) / 2).backward()
            opt.step()
    assert_same(model, reference)


@with_and_without_overlap
def case_fewer_backward_passes_than_configured() -> None:
    model = build()
    train(model, hvd.DistributedOptimizer(SGD(model.parameters()), backward_passes_per_step=3), parts())
    assert_same(model, trained_by_torch())


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(CLASSES, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x))


@with_and_without_overlap
def case_parameters_that_are_unused_on_some_or_all_ranks() -> None:
    def loss(net: TwoHeads, batch: Any, rank: int) -> torch.Tensor:
        x, y = part(batch, rank)
        return torch.nn.functional.cross_entropy(net(x, rank), y)

    model, reference = TwoHeads(), TwoHeads()
    optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()))
    plain = ADAM(reference.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss(model, batch, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        ((loss(reference, batch, 0) + loss(reference, batch, 1)) / 2).backward()
        plain.step()
    assert_same(model, reference)


@with_and_without_overlap
def case_parameters_that_are_frozen_and_unfrozen() -> None:
    def train_in_parts(net: torch.nn.Module, opt: Any, data: Sequence[Any]) -> None:
        for step, batch in enumerate(data):
            net[0].requires_grad_(step >= 2)
            train(net, opt, [batch])

    model, reference = build(), build()
    train_in_parts(model, hvd.DistributedOptimizer(SGD(model.parameters())), parts())
    train_in_parts(reference, SGD(reference.parameters()), batches())
    assert_same(model, reference)
    assert not torch.equal(model[0].weight, build()[0].weight)


@with_and_without_overlap
def case_parameters_that_are_frozen_while_a_rank_leaves_the_last_ones_unused() -> None:
    """A rank has sent their bucket in its backward pass, and the other has not."""

    def loss_of_rank(net: Any, rank: int, batch: Any) -> torch.Tensor:
        inputs, labels = part(batch, rank)
        hidden = net[:4](inputs)
        return torch.nn.functional.cross_entropy(hidden[:, :CLASSES] if rank else net[4](hidden), labels)

    def train_on(net: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step, batch in enumerate(batches()):
            net[0].requires_grad_(step not in {2, 3})
            optimizer.zero_grad()
            torch.stack([loss_of_rank(net, rank, batch) for rank in ranks]).mean().backward()
            optimizer.step()

    model, reference = build(), build()
    train_on(model, hvd.DistributedOptimizer(SGD(model.parameters())), [hvd.rank()])
    train_on(reference, SGD(reference.parameters()), [0, 1])
    assert_same(model, reference)


@with_and_without_overlap
def case_groups_of_parameters() -> None:
    def groups(net: torch.nn.Module) -> list[dict[str, Any]]:
        return [{"params": net[4].parameters(), "lr": 0.01}, {"params": net[2].parameters()}]

    model, reference = build(), build()
    optimizer, plain = hvd.DistributedOptimizer(SGD(groups(model))), SGD(groups(reference))
    train(model, optimizer, parts()[:2])
    train(reference, plain, batches()[:2])
    optimizer.add_param_group({"params": list(model[0].parameters())})
    plain.add_param_group({"params": list(reference[0].parameters())})
    train(model, optimizer, parts()[2:])
    train(reference, plain, batches()[2:])
    assert_same(model, reference)


@with_and_without_overlap
def case_arguments_that_do_not_change_the_result() -> None:
    reference = trained_by_torch()
    for arguments in (
        {"groups": 2},
        {"num_groups": 3},
        {"gradient_predivide_factor": 4.0},
        {"sparse_as_dense": True},
        {"groups": lambda net: [list(net[4].parameters()), [net[0].weight]]},
    ):
        model = build()
        given = {name: value(model) if callable(value) else value for name, value in arguments.items()}
        train(model, hvd.DistributedOptimizer(SGD(model.parameters()), **given), parts())
        assert_same(model, reference)


@with_and_without_overlap
def case_sum() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), op=hvd.Sum)
    for batch in parts():
        optimizer.zero_grad()
        (loss_of(model, batch) / 2).backward()
        optimizer.step()
    assert_same(model, trained_by_torch())


class Doubled(torch.optim.SGD):
    """A user's subclass whose step calls that of its base class, for which torch calls hooks, too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return super().step(closure)


@with_and_without_overlap
def case_a_step_that_calls_the_one_of_its_base_class_reduces_once() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(Doubled(model.parameters(), lr=0.05, momentum=0.9), op=hvd.Sum)
    for batch in parts():
        optimizer.zero_grad()
        (loss_of(model, batch) / 2).backward()
        optimizer.step()
    assert_same(model, trained_by_torch(functools.partial(Doubled, lr=0.05, momentum=0.9)))


@with_and_without_overlap
def case_compression() -> None:
    communicator = hvd.global_process_set.communicator
    sent = {}
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = build()
        before = communicator.bytes_sent
        train(model, hvd.DistributedOptimizer(SGD(model.parameters()), compression=compression), parts())
        sent[compression] = communicator.bytes_sent - before
        assert_same(model, trained_by_torch(), tolerance=5e-3)
    assert sent[hvd.Compression.none] == 2 * sent[hvd.Compression.fp16]


@with_and_without_overlap
def case_bfloat16_and_sparse_gradients() -> None:
    model = build().to(torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    x, y = parts()[0]
    torch.nn.functional.cross_entropy(model(x.to(torch.bfloat16)), y).backward()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.synchronize()
    for parameter, gradient in zip(model.parameters(), mine, strict=True):
        both = hvd.allgather(gradient[None])
        torch.testing.assert_close(parameter.grad, both.float().mean(0).to(torch.bfloat16))
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([hvd.rank(), 3])).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 1]


@with_and_without_overlap
def case_clipping_of_reduced_gradients() -> None:
    reference = build()
    plain = SGD(reference.parameters())
    for batch in batches():
        plain.zero_grad()
        loss_of(reference, batch).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    for skip in (True, False):
        model = build()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        first, *others = parts()
        for batch in (first, *others):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            elif batch is first:
                with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize") as warned:
                    optimizer.step()
                assert [each.filename for each in warned] == [__file__]
            else:
                optimizer.step()
        assert_same(model, reference)


@with_and_without_overlap
def case_gradient_changed_before_the_reduction_is_an_error() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    for change in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: setattr(model[0].weight, "grad", torch.zeros_like(model[0].weight)),
    ):
        loss_of(model, parts()[0]).backward()
        change()
        with pytest.raises(ConfigError, match=r"call optimizer\.synchronize\(\) after backward"):
            optimizer.step()
        optimizer.zero_grad()


@with_and_without_overlap
def case_loss_scaling() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, batch in enumerate(parts()):
        optimizer.zero_grad()
        # The gradient of one rank is not finite: all ranks skip the step.
        scaler.scale(loss_of(model, batch) * (float("inf") if index == 2 and hvd.rank() == 1 else 1.0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    reference = build()
    train(reference, SGD(reference.parameters()), [batch for index, batch in enumerate(batches()) if index != 2])
    assert_same(model, reference)


@with_and_without_overlap
def case_zero_grad_and_backward_in_the_wrong_order() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    loss_of(model, parts()[0]).backward()
    optimizer.zero_grad()
    for reduce in (optimizer.step, optimizer.synchronize):
        loss_of(model, parts()[0]).backward()
        optimizer.zero_grad()
        with pytest.raises(ConfigError, match="between backward"):
            reduce()
    loss_of(model, parts()[0]).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss_of(model, parts()[0]).backward()
    with pytest.raises(ConfigError, match="backward_passes_per_step is 1"):
        loss_of(model, parts()[0]).backward()


@with_and_without_overlap
def case_two_optimizers_of_the_same_parameters() -> None:
    model = build()
    optimizers = [hvd.DistributedOptimizer(SGD(model.parameters())) for _ in range(2)]
    loss_of(model, parts()[0]).backward()
    optimizers[1].step()
    with pytest.raises(ConfigError, match="Another DistributedOptimizer of these parameters"):
        loss_of(model, parts()[0]).backward()
    with pytest.raises(ConfigError, match="a gradient was changed"):
        optimizers[0].step()


def case_a_critic_whose_generator_passes_it_too():
    """A GAN's critic is passed three times from step to step; an error has counted them."""
    for passes in (2, 3):
        torch.manual_seed(0)
        critic, generator = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
        critics = hvd.DistributedOptimizer(SGD(critic.parameters()), backward_passes_per_step=passes)
        generators = hvd.DistributedOptimizer(SGD(generator.parameters()))

        def update(critic=critic, generator=generator, critics=critics, generators=generators):
            fake = generator(torch.ones(4, 2))
            critic.zero_grad()  # as PyTorch's example
            critic(torch.ones(4, 3)).mean().backward()
            (-critic(fake.detach())).mean().backward()
            critics.step()
            generator.zero_grad()
            critic(fake).mean().backward()
            generators.step()

        update()
        if passes == 2:
            with pytest.raises(ConfigError, match=r"computed 3 times .* pass backward_passes_per_step=3"):
                update()
        else:
            update()


@with_and_without_overlap
def case_a_critic_whose_gradients_are_dropped() -> None:
    """A GAN: those of the generator's pass are of no step."""

    def trained(wrap: Any, rank: int | None, passes: int, **given: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        critic, generator = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
        critics = wrap(SGD(critic.parameters()), backward_passes_per_step=passes, **given)
        generators = wrap(SGD(generator.parameters()), **given)

        def mean(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            ranks = range(hvd.size()) if rank is None else [rank]
            return sum(of(torch.full((4, 2), 0.1 + each)) for each in ranks) / len(ranks)

        for _ in range(3):
            critics.zero_grad()
            losses = [
                mean(lambda noise: critic(torch.ones(4, 3)).mean() * noise.mean()),
                mean(lambda noise: -critic(generator(noise).detach()).mean()),
            ]
            for loss in losses if passes == 2 else [sum(losses)]:
                loss.backward()
            critics.step()
            generators.zero_grad()
            mean(lambda noise: critic(generator(noise)).square().mean()).backward()
            generators.step()
        return [*critic.parameters(), *generator.parameters()]

    for passes in (1, 2):
        plain = trained(lambda optimizer, **_: optimizer, None, passes)
        for shard_state in (False, True):
            own = trained(hvd.DistributedOptimizer, hvd.rank(), passes, shard_state=shard_state)
            torch.testing.assert_close(own, plain)


@with_and_without_overlap
def case_closures() -> None:
    model = build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    for index, batch in enumerate(parts()):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        assert (optimizer.step(closure) if index % 2 else optimizer.step(closure=closure)) > 0
    assert_same(model, trained_by_torch())


@with_and_without_overlap
def case_learning_rate_schedulers() -> None:
    reference = build()
    plain = SGD(reference.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for batch in batches():
        train(reference, plain, [batch])
        scheduler.step()
    for created_before in (True, False):
        model = build()
        optimizer = SGD(model.parameters())
        if created_before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        hvd.DistributedOptimizer(optimizer)
        if not created_before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for batch in parts():
            train(model, optimizer, [batch])
            scheduler.step()
        assert_same(model, reference)


def case_optimizer_keeps_its_class_and_state() -> None:
    model = build()
    optimizer = ADAM(model.parameters())
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert repr(optimizer).startswith("Adam (")
    assert optimizer._parameter_names[model[2].weight] == "parameter 0.2"  # Horovod's name of it
    train(model, optimizer, parts()[:2])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for other in (ADAM(build().parameters()), hvd.DistributedOptimizer(ADAM(build().parameters()))):
        other.load_state_dict(saved)
        assert other.state_dict()["state"][0]["step"] == 2
    train(model, optimizer, parts()[2:])
    trained = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, parts()[2:])
    torch.testing.assert_close(model.state_dict(), trained)
    assert type(copy.deepcopy(optimizer)) is type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam
    copy.deepcopy(optimizer).zero_grad()
    pickle.loads(pickle.dumps(model))


@with_and_without_overlap
def case_ranks_with_different_initial_weights() -> None:
    model = build(seed=hvd.rank())
    model.register_buffer("count", torch.tensor(hvd.rank()))
    optimizer = SGD(model.parameters(), lr=0.1 if hvd.rank() == 0 else 0.7)
    if hvd.rank() == 0:
        train(model, optimizer, batches()[:1])
    hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, parts()[1:])
    model.__delattr__("count")
    assert_same(model, trained_by_torch())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    other = hvd.broadcast_object(model, root_rank=1)
    assert_same(model, other, tolerance=0)


@with_and_without_overlap
def case_join_between_the_backward_passes_of_a_step() -> None:
    """As scripts do that use it as a barrier; a rank without batches keeps what it has accumulated."""
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), backward_passes_per_step=2)
    plain = ADAM(reference.parameters())
    for index, batch in enumerate(parts()[: 3 + hvd.rank()]):
        (loss_of(model, batch) / 2).backward()
        if index == 0:
            hvd.join()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert hvd.join() == 1
    for index, batch in enumerate([*batches()[:2], *(part(each, rank=1) for each in batches()[2:4])]):
        (loss_of(reference, batch) / 2).backward()
        if index % 2:
            plain.step()
            plain.zero_grad()
    assert_same(model, reference)
    del optimizer
    gc.collect()


@with_and_without_overlap
def case_join() -> None:
    gc.collect()  # removes optimizers of earlier cases
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()))
    plain = ADAM(reference.parameters())
    train(model, optimizer, parts() if hvd.rank() == 1 else parts()[:2])
    train(reference, plain, [*batches()[:2], *(part(batch, rank=1) for batch in batches()[2:])])
    assert hvd.join() == 1
    assert_same(model, reference)
    assert optimizer.state_dict()["state"][0]["step"] == STEPS
    train(model, optimizer, parts()[:1])
    train(reference, plain, batches()[:1])
    assert hvd.join() == 0
    assert_same(model, reference)
    loss_of(model, parts()[0]).backward()
    with pytest.raises(ConfigError, match=r"call step\(\) first"):
        hvd.join()
    optimizer.synchronize()
    del optimizer
    gc.collect()


@with_and_without_overlap
def case_different_models_mismatch() -> None:
    model = build()
    if hvd.rank() == 1:
        model[4] = torch.nn.Linear(16, CLASSES + 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    loss_of(model, parts()[0]).backward()
    with pytest.raises(MismatchError, match=r"float32\[4, 16\]"):
        optimizer.step()
    with pytest.raises(MismatchError, match=r"'4.bias', root=0, dtype=float32, shape=\(4,\)"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()


@with_and_without_overlap
def case_process_sets() -> None:
    alone = hvd.add_process_set([0])
    model, reference = build(), build()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), process_set=alone)
    train(model, optimizer, parts())
    train(reference, SGD(reference.parameters()), parts())
    assert_same(model, reference, tolerance=0)
    hvd.remove_process_set(alone)


def case_invalid_arguments() -> None:
    model = build()
    names = list(model.named_parameters())
    for text, arguments in {
        "more than once": {"named_parameters": [*names, names[0]]},
        "lacks 5": {"named_parameters": names[:1]},
        r"pairs \(name, parameter\)": {"named_parameters": model.parameters()},
        "must be 1 or more": {"backward_passes_per_step": 0},
        "Average or Sum": {"op": hvd.Max},
        "groups=-1": {"groups": -1},
        "does not train": {"groups": [[torch.zeros(1)]]},
        "twice": {"groups": [[*model.parameters()], [*model.parameters()][:1]]},
    }.items():
        with pytest.raises(ConfigError, match=text):
            hvd.DistributedOptimizer(SGD(model.parameters()), **arguments)
    with pytest.raises(ConfigError, match="not a Sequential"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(ConfigError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(SGD(model.parameters())))


def case_collectives() -> None:
    rank = float(hvd.rank())
    tensor = torch.tensor([rank, 2.0])
    assert hvd.allreduce(tensor, name="mean").tolist() == [0.5, 2]
    assert hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.fp16).tolist() == [2, 8]
    assert hvd.allreduce(hvd.rank()) == 0.5
    with pytest.warns(DeprecationWarning, match="op=Average or op=Sum"):
        assert hvd.allreduce(tensor, average=False).tolist() == [1, 4]
    with pytest.raises(ConfigError, match="not both"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    inplace = tensor.clone()
    assert hvd.allreduce_(inplace, op=hvd.Max) is inplace
    assert inplace.tolist() == [1, 2]
    first, second = hvd.grouped_allreduce([tensor, torch.tensor([[hvd.rank()]])], op=hvd.Sum)
    assert (first.tolist(), second.tolist()) == ([1, 4], [[1]])
    assert hvd.allgather(tensor[None][: hvd.rank() + 1]).tolist() == [[0, 2], [1, 2]]
    assert hvd.broadcast(tensor, root_rank=1).tolist() == [1, 2]
    weight = torch.nn.Parameter(tensor.clone())
    assert hvd.broadcast_(weight, root_rank=1) is weight
    assert weight.tolist() == [1, 2]
    assert hvd.alltoall(tensor).tolist() == ([2, 2] if hvd.rank() else [0, 1])
    received, splits = hvd.alltoall(tensor, splits=torch.tensor([0, 2]))
    assert (received.tolist(), splits.tolist()) == (([0, 2, 1, 2], [2, 2]) if hvd.rank() else ([], [0, 0]))
    assert hvd.reducescatter(tensor, op=hvd.Sum).tolist() == ([4] if hvd.rank() else [1])
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


def case_asynchronous_collectives() -> None:
    tensors = [torch.full((1000,), float(hvd.rank() + index)) for index in range(8)]
    handles = [hvd.allreduce_async(tensor, name=str(index)) for index, tensor in enumerate(tensors)]
    inplace = hvd.allreduce_async_(tensors[0].clone(), op=hvd.Sum)
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [index + 0.5 for index in range(8)]
    assert all(map(hvd.poll, handles))
    overwritten = tensors[1].clone()
    assert hvd.synchronize(hvd.allreduce_async_(overwritten, op=hvd.Sum)) is overwritten
    assert overwritten[0] == 3
    assert hvd.synchronize(inplace)[0] == 1
    with pytest.raises(MismatchError, match="name='1'"):
        hvd.synchronize(hvd.allreduce_async(tensors[0], name=str(hvd.rank())))


def case_backward_passes_outside_of_training_steps() -> None:
    """``BackwardExchange`` as used by Keras: weighted by examples, with hooks that ignore other backward passes."""
    model = build()
    parameters = list(model.parameters())
    examples: list[int] = []
    reducer = GradientReducer(ReduceConfig(bucket_bytes=256))
    exchange = BackwardExchange(reducer, parameters, examples=lambda: examples[-1] if examples else None)
    communicator = hvd.global_process_set.communicator

    def backward(rows: slice) -> list[torch.Tensor]:
        model.zero_grad()
        x, y = batches()[0]
        loss_of(model, (x[rows], y[rows])).backward()
        return [parameter.grad for parameter in parameters if parameter.requires_grad]

    whole = [gradient.clone() for gradient in backward(slice(None))]
    mine = slice(0, 3) if hvd.rank() == 0 else slice(3, 8)
    for step in range(3):
        examples.append(3 if hvd.rank() == 0 else 5)
        gradients = backward(mine)
        torch.testing.assert_close(exchange.reduce(parameters, gradients), whole, rtol=1e-5, atol=1e-6)
        examples.clear()
        before = communicator.collectives
        for _ in range(1 + hvd.rank()):
            backward(mine)
        assert communicator.collectives == before, step
    model[0].requires_grad_(False)
    examples.append(1)
    reduced = exchange.reduce(parameters[2:], backward(slice(None)))
    torch.testing.assert_close(reduced, whole[2:], rtol=1e-5, atol=1e-6)


def case_hooks_are_removed_with_their_optimizer() -> None:
    model = build()
    with overlapping(True):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        train(model, optimizer, parts()[:2])
        del optimizer
        gc.collect()
        before = hvd.global_process_set.communicator.collectives
        loss_of(model, parts()[0]).backward()
        loss_of(model, parts()[0]).backward()
        assert hvd.global_process_set.communicator.collectives == before


def case_state_of_unused_optimizers_is_created_and_the_next_step_is_the_first() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    for make, created in (
        (ADAM, True),
        (functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True), True),
        (functools.partial(torch.optim.Adamax, weight_decay=0.1), True),
        (torch.optim.RAdam, True),
        (torch.optim.Adadelta, True),
        (functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True), True),
        (SGD, True),
        (sgd, False),
        (functools.partial(sgd, momentum=0.9, dampening=0.5), False),
        (torch.optim.Adagrad, True),
        (torch.optim.NAdam, False),
        (torch.optim.Rprop, False),
    ):
        model = build()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()))
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        assert bool(optimizer.state_dict()["state"]) == created, make
        gradients = [parameter.grad for parameter in model.parameters()]  # of zeros, which Horovod's scripts read
        if make is torch.optim.Adagrad:  # has its state from the beginning
            assert gradients == [None] * 6
        else:
            assert not any(gradient.any() for gradient in gradients)
        train(model, optimizer, parts())
        assert_same(model, trained_by_torch(make), tolerance=1e-4)
    with pytest.raises(ConfigError, match="LBFGS cannot be broadcast"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(build().parameters()), 0)


def case_state_that_is_broadcast_keeps_its_dtypes() -> None:
    """``mu_product`` of NAdam is of float32, with parameters of any dtype."""
    for dtype in (torch.float64, torch.bfloat16):
        model = build().to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.NAdam(model.parameters(), lr=0.01, momentum_decay=0.01))
        data = [(inputs.to(dtype), labels) for inputs, labels in parts()]
        train(model, optimizer, data[:3])
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert {each["mu_product"].dtype for each in optimizer.state.values()} == {torch.float32}
        train(model, optimizer, data[3:])
        for parameter in model.parameters():
            assert torch.equal(parameter, hvd.broadcast(parameter, root_rank=0))


def case_named_tuples_in_an_optimizers_settings() -> None:
    adam = ADAM(build().parameters())
    adam.param_groups[0]["limits"] = Limits(0.5 + hvd.rank(), 0.9)
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    limits = adam.param_groups[0]["limits"]
    assert isinstance(limits, Limits)
    assert limits == (0.5, 0.9)


def case_parameters_in_every_form() -> None:
    for form in (
        lambda model: model.state_dict(),
        lambda model: dict(reversed(model.state_dict().items())) if hvd.rank() else model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
    ):
        model = build(seed=hvd.rank())
        hvd.broadcast_parameters(form(model), root_rank=1)
        assert_same(model, build(seed=1), tolerance=0)
    for wrong in (build(), torch.ones(2), "weights", 3):
        with pytest.raises(ValueError, match=r"takes model\.state_dict\(\)"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    for wrong in ([build().state_dict(), build().state_dict()], {"model": build().state_dict(), "epoch": 3}):
        with pytest.raises(ValueError, match=r"state_dict\(\) of one model"):
            hvd.broadcast_parameters(wrong, root_rank=0)


def case_parameters_of_two_models_with_equal_names() -> None:
    one, other = build(seed=hvd.rank()), build(seed=hvd.rank() + 7)
    hvd.broadcast_parameters([*one.named_parameters(), *other.named_parameters()], root_rank=1)
    assert_same(one, build(seed=1), tolerance=0)
    assert_same(other, build(seed=8), tolerance=0)


def case_collectives_in_place_of_tensors_of_the_inference_mode() -> None:
    with torch.inference_mode():
        rank = torch.full((3,), hvd.rank())
        hvd.synchronize(hvd.broadcast_async_(rank, 1))
        assert rank.tolist() == [1, 1, 1]
        total = torch.ones(2, dtype=torch.int32)
        hvd.synchronize(hvd.grouped_allreduce_async_([total, rank], op=hvd.Sum))
        assert (total.tolist(), rank.tolist()) == ([hvd.size()] * 2, [hvd.size()] * 3)


def words(batch: int, rank: int, rows: int = 4) -> torch.Tensor:
    """The words of a rank's sentence; some occur twice, some on both ranks."""
    return (torch.arange(rows) * (rank + 2) + 3 * batch) % 7


class Embedded(torch.nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(9, 3, sparse=True)
        self.bag = torch.nn.EmbeddingBag(9, 3, mode="sum", sparse=True)
        self.dense = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, with_bag: bool) -> torch.Tensor:
        hidden = self.table(x)
        return self.dense(hidden + self.bag(x[:, None]) if with_bag else hidden).square().mean()


@with_and_without_overlap
def case_sparse_gradients_stay_sparse() -> None:
    def optimizers(model: Embedded, wrap: Callable[[Any], Any]) -> list[Any]:
        tables = [*model.table.parameters(), *model.bag.parameters()]
        return [
            wrap(torch.optim.SparseAdam(tables, lr=0.1)),
            wrap(torch.optim.SGD(model.dense.parameters(), lr=0.1)),
        ]

    model, reference = Embedded(), Embedded()
    ours, plain = optimizers(model, hvd.DistributedOptimizer), optimizers(reference, lambda optimizer: optimizer)
    for optimizer in ours:
        hvd.broadcast_optimizer_state(optimizer, 0)
    for batch in range(STEPS):
        for optimizer in (*ours, *plain):
            optimizer.zero_grad()
        # Batches of different sizes; rank 1 does not use one of the tables at first.
        losses = [
            net(words(batch, rank, 3 + rank), rank == 0 or batch > 1) for net in (model, reference) for rank in (0, 1)
        ]
        losses[hvd.rank()].backward()
        (sum(losses[2:]) / 2).backward()
        for optimizer in (*ours, *plain):
            optimizer.step()
        assert model.table.weight.grad.is_sparse
        assert len(model.table.weight.grad._values()) == 7
    assert_same(model, reference)


def case_sparse_gradients_as_dense() -> None:
    model, reference = Embedded(), Embedded()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam([model.table.weight, model.bag.weight]), sparse_as_dense=True
    )
    plain = torch.optim.SparseAdam([reference.table.weight, reference.bag.weight])
    for batch in range(STEPS):
        optimizer.zero_grad()
        model(words(batch, hvd.rank()), with_bag=True).backward()
        optimizer.step()
        assert model.table.weight.grad.is_sparse
        plain.zero_grad()
        (sum(reference(words(batch, rank), with_bag=True) for rank in range(2)) / 2).backward()
        plain.step()
    assert_same(model, reference)


@with_and_without_overlap
def case_sparse_gradients_and_ranks_without_batches() -> None:
    gc.collect()
    for steps in ((0, 3), (2, 4)):
        model, reference = Embedded(), Embedded()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for batch in range(steps[hvd.rank()]):
            optimizer.zero_grad()
            model(words(batch, hvd.rank()), with_bag=True).backward()
            optimizer.step()
        assert hvd.join() == 1
        optimizer.zero_grad()
        model(words(5, hvd.rank()), with_bag=True).backward()
        optimizer.step()
        for batch in (*range(max(steps)), 5):
            ranks = [rank for rank in range(2) if batch < steps[rank] or batch == 5]
            plain.zero_grad()
            (sum(reference(words(batch, rank), with_bag=True) for rank in ranks) / len(ranks)).backward()
            plain.step()
        assert_same(model, reference)
        del optimizer
        gc.collect()


@with_and_without_overlap
def case_the_number_of_backward_passes_can_change() -> None:
    model, reference = build(), build()
    optimizer, plain = hvd.DistributedOptimizer(SGD(model.parameters())), SGD(reference.parameters())
    for passes, data in ((1, batches(1)), (3, batches(4)[1:]), (2, batches(6)[4:])):
        if passes == 3:
            optimizer.backward_passes_per_step = passes  # as loops of DLRover's do
        else:
            optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        for net, opt, own in ((model, optimizer, part), (reference, plain, lambda batch: batch)):
            opt.zero_grad()
            for batch in data:
                (loss_of(net, own(batch)) / passes).backward()
            opt.step()
    assert_same(model, reference)
    with pytest.raises(ConfigError, match="must be 1 or more"):
        optimizer.set_backward_passes_per_step(0)


def case_torch_compile_does_not_trace_collectives() -> None:
    def metric(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x.mean()) * 2 + 1

    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.compile(metric, backend="eager")(torch.full((2,), float(hvd.rank()))) == 2.0
        torch.compile(step, backend="eager")(torch.ones(2, 2))
    assert [text for each in caught if "Dynamo" in (text := str(each.message))] == []


def adasum_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, first, second = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * first)) * a + (1 - dot / (2 * second)) * b


def case_adasum_combines_what_each_rank_has_changed() -> None:
    for make, compression, tolerance in ((SGD, hvd.Compression.none, 1e-5), (ADAM, hvd.Compression.fp16, 5e-3)):
        model = build()
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), op=hvd.Adasum, compression=compression, backward_passes_per_step=2
        )
        ranks = [build(), build()]
        plain = [make(net.parameters()) for net in ranks]
        for batch in batches():
            for net, opt, own in (
                (model, optimizer, part(batch)),
                *((net, opt, part(batch, rank)) for rank, (net, opt) in enumerate(zip(ranks, plain, strict=True))),
            ):
                before = [parameter.detach().clone() for parameter in net.parameters()]
                opt.zero_grad()
                for half in (slice(0, 2), slice(2, 4)):
                    loss_of(net, (own[0][half], own[1][half])).backward()
                opt.step()
            changes = [[p.detach() - old for p, old in zip(net.parameters(), before, strict=True)] for net in ranks]
            with torch.no_grad():
                for net in ranks:
                    for p, old, *both in zip(net.parameters(), before, *changes, strict=True):
                        p.copy_(old + adasum_of(*both))
        assert_same(model, ranks[0], tolerance)
    assert isinstance(optimizer, torch.optim.Adam)
    optimizer.synchronize()
    with pytest.raises(ConfigError, match="not possible with op=Adasum"), optimizer.skip_synchronize():
        pass


def case_synchronised_batch_normalisation_is_that_of_the_global_batch() -> None:
    torch.manual_seed(5)
    data = torch.randn(9, 4, 3) * 2 + 1
    weights = torch.randn(9, 4, 3)
    for rows in ((4, 5), (1, 8), (0, 9)):
        mine = slice(0, rows[0]) if hvd.rank() == 0 else slice(rows[0], 9)
        for dtype, arguments in itertools.product(
            (torch.float32, torch.bfloat16), ({}, {"momentum": None, "eps": 0.1}, {"affine": False})
        ):
            layer, plain = hvd.SyncBatchNorm(4, **arguments), torch.nn.BatchNorm1d(4, **arguments)
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
            for _ in range(2):
                own = data[mine].to(dtype).clone().requires_grad_()
                whole = data.to(dtype).float().clone().requires_grad_()
                result, expected = layer(own), plain(whole)
                assert result.dtype == dtype
                torch.testing.assert_close(result.float(), expected[mine], **tolerance)
                (result * weights[mine]).sum().backward()
                (expected * weights).sum().backward()
                torch.testing.assert_close(own.grad.float(), whole.grad[mine], **tolerance)
            for name, buffer in layer.named_buffers():
                torch.testing.assert_close(buffer, dict(plain.named_buffers())[name], rtol=1e-4, atol=1e-4)
            for parameter, other in zip(layer.parameters(), plain.parameters(), strict=True):
                total = hvd.allreduce(parameter.grad, op=hvd.Sum)
                torch.testing.assert_close(total, other.grad, rtol=0.05, atol=0.3)
            torch.testing.assert_close(layer.eval()(data), plain.eval()(data), rtol=1e-3, atol=1e-3)
    untracked = hvd.SyncBatchNorm(4, track_running_stats=False).eval()
    expected = torch.nn.BatchNorm1d(4, track_running_stats=False)(data)
    torch.testing.assert_close(untracked(data[mine]), expected[mine], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="not of 1 dimensions"):
        untracked(torch.ones(3))


def case_training_with_synchronised_batch_normalisation_equals_one_process() -> None:
    def net(layer: Callable[[int], Any]) -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), layer(8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))

    model, reference = net(hvd.SyncBatchNorm), net(torch.nn.BatchNorm1d)
    train(model, hvd.DistributedOptimizer(SGD(model.parameters())), parts())
    train(reference, SGD(reference.parameters()), batches())
    assert_same(model, reference, tolerance=1e-4)
