"""Horovod's elastic API on two ranks, none of which is lost: an error that a program raises has the same effect."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object, object_of_first
from choros.training.sliced_optimizer import whole_values

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X @ np.ones((3, 1), "float32")


def model(seed: int, optimizer: Any = None) -> Any:
    built = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed))]
    )
    built.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.1)), "mse")
    return built


def values(built: Any) -> list[Any]:
    return [
        np.asarray(each) for each in (*built.get_weights(), *map(keras.ops.convert_to_numpy, built.optimizer.variables))
    ]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def assert_same_on_all_ranks(own: list[Any]) -> None:
    for other in allgather_object(own):
        assert_same(own, other)


def case_a_keras_state_goes_on_from_the_last_commit():
    """Two epochs of four batches; in the second a rank would be lost after two, of which one was committed."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not failures and state.epoch == 1 and batch == 1:
                failures.append(batch)
                raise hvd.elastic.HorovodInternalError("as if a rank was lost")

    failures: list[int] = []
    resets: list[int] = []
    own = model(hvd.rank())
    state = hvd.elastic.KerasState(own, epoch=0, batch=0)
    state.register_reset_callbacks([lambda: resets.append(1)])

    @hvd.elastic.run
    def train(state: Any) -> Any:
        callbacks = [
            Fails(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ]
        batches = hvd.shard((X, Y), batch_size=8)
        return state.model.fit(batches, epochs=2 - state.epoch, callbacks=callbacks, shuffle=False, verbose=0)

    train(state)
    assert (failures, resets, state.epoch, state.batch) == ([1], [1], 2, 0)
    assert_same_on_all_ranks(values(own))
    plain = model(0)  # rank 0's weights
    plain.fit(hvd.shard((X, Y), batch_size=8), epochs=2, shuffle=False, verbose=0)
    assert_same(values(own), values(plain))


def case_a_keras_state_is_synchronised_and_restored():
    own = model(hvd.rank())
    state = hvd.elastic.KerasState(own, epoch=hvd.rank() + 4)
    state.sync()
    assert state.epoch == 4
    assert_same_on_all_ranks(values(own))
    before = values(own)
    own.fit(X, Y, batch_size=8, verbose=0)
    state.epoch = 9
    state.restore()
    assert state.epoch == 4
    assert_same(values(own), before)


def case_commits_during_an_epoch_have_the_weights_of_the_step():
    own = model(3)
    state = hvd.elastic.KerasState(own, batch=0)
    seen: list[Any] = []

    class Records(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(np.asarray(self.model.get_weights()[0]))

    class Counts(hvd.elastic.CommitStateCallback):
        def commit(self) -> None:
            counted.append(1)
            super().commit()

    counted: list[int] = []
    commits: list[Any] = []
    save = state.save

    def recorded() -> None:
        save()
        commits.append(state.committed()["values"][0])

    state.save = recorded  # type: ignore[method-assign]
    own.fit(X, Y, batch_size=8, verbose=0, callbacks=[Records(), Counts(state, 2)])
    assert_same(commits, [seen[1], seen[3], seen[3]])
    assert len(counted) == 3
    seen.clear(), commits.clear()
    by_the_script = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: state.commit())
    own.fit(X, Y, batch_size=8, verbose=0, callbacks=[by_the_script, Records()])
    assert_same(commits, seen)


def case_commits_change_nothing_for_a_rank_without_batches():
    """It has its part of what a commit moves into the optimizer's accumulators, in slices too."""
    rows = slice(None, 20) if hvd.rank() else slice(20, None)

    def trained(*more: Any, shard_state: bool) -> list[Any]:
        own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(300, kernel_initializer="zeros")])
        adam = keras.optimizers.Adam(0.1)
        own.compile(hvd.DistributedOptimizer(adam, backward_passes_per_step=3, shard_state=shard_state), "mse")
        callbacks = [hvd.callbacks.MetricAverageCallback()]
        if more:
            callbacks.append(hvd.elastic.CommitStateCallback(hvd.elastic.KerasState(own), *more))
        own.fit(X[rows], Y[rows], batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return list(own.get_weights())

    for shard_state in (False, True):
        assert_same(trained(1, shard_state=shard_state), trained(shard_state=shard_state))


def case_a_commit_has_the_state_of_all_optimizers():
    def with_two_optimizers() -> Any:
        own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(300, kernel_initializer="zeros")])
        first, own.second = (hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), shard_state=True) for _ in range(2))
        own.compile(first, "mse")
        for each in (first, own.second):
            each.build(own.trainable_variables)
        return own

    def whole(own: Any) -> list[Any]:
        return [each for optimizer in (own.optimizer, own.second) for each in whole_values(optimizer)]

    trained, started_again = with_two_optimizers(), with_two_optimizers()
    own = [keras.ops.ones(each.shape) * (hvd.rank() + 1) for each in trained.trainable_variables]
    trained.optimizer.apply(own, trained.trainable_variables)
    trained.second.apply([2 * each for each in own], trained.trainable_variables)
    committed = object_of_first(hvd.elastic.KerasState(trained).committed)
    state = hvd.elastic.KerasState(started_again)
    state.use(committed)
    state.restore()
    assert_same(whole(started_again), whole(trained))
    assert_same(started_again.get_weights(), trained.get_weights())
    started_again.third = keras.optimizers.Adam(0.1)
    started_again.third.build(started_again.trainable_variables)
    with pytest.raises(ConfigError, match="has the state of 2 optimizers, and 3 are built"):
        state.use(committed)


def case_a_model_without_variables_is_an_error():
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match="must be built"):
        hvd.elastic.KerasState(unbuilt)


def case_a_torch_state_goes_on_from_the_last_commit():
    import torch

    import choros.torch as hvd

    x, y = torch.from_numpy(X), torch.from_numpy(Y)

    def train(failing: int | None) -> tuple[Any, list[int]]:
        torch.manual_seed(hvd.rank() if failing else 0)
        own = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(own.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=own.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        sampler = hvd.elastic.ElasticSampler(x, seed=2)
        state = hvd.elastic.TorchState(own, optimizer, scheduler=scheduler, sampler=sampler, step=0)
        seen: list[int] = []
        failed: list[int] = []

        @hvd.elastic.run
        def loop(state: Any) -> None:
            loader = torch.utils.data.DataLoader(range(len(x)), batch_size=2, sampler=state.sampler)
            for batch, indices in enumerate(loader):
                state.optimizer.zero_grad()
                torch.nn.functional.mse_loss(state.model(x[indices]), y[indices]).backward()
                if state.step == failing and not failed:
                    failed.append(1)
                    raise hvd.elastic.HorovodInternalError("as if a rank was lost")
                state.optimizer.step()
                state.scheduler.step()
                state.sampler.record_batch(batch, 2)
                state.step += 1
                seen.append((state.step, indices.tolist()))
                if state.step % 2 == 0:
                    state.commit()

        loop(state)
        kept = dict(seen)  # steps that were made again replace those that were lost
        return [each.detach().numpy() for each in own.parameters()], [index for step in kept.values() for index in step]

    ours, own_indices = train(failing=5)
    theirs, _ = train(failing=None)
    assert_same(ours, theirs)
    assert sorted(index for each in allgather_object(own_indices) for index in each) == list(range(len(x)))


def case_a_commit_of_a_torch_state_is_in_host_memory(monkeypatch):
    import torch

    import choros.torch as hvd

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2, device=device)).sum().backward()
    optimizer.step()
    state, moved = hvd.elastic.TorchState(model, optimizer), []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (moved.append(tensor), to_host(tensor))[1])
    handlers = state.committed()["handlers"]
    monkeypatch.undo()
    assert handlers["model"]._metadata == model.state_dict()._metadata
    slots = [each for slot in handlers["optimizer"]["state"].values() for each in slot.values()]
    assert {each.device.type for each in (*handlers["model"].values(), *slots)} == {"cpu"}
    assert len(moved) == len(model.state_dict()) + len(slots)


def case_a_commit_between_the_backward_passes_of_a_step_of_torch_is_warned_of():
    import torch

    import choros.torch as hvd

    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    for passes in range(4):
        model(torch.ones(1, 2)).sum().backward()
        if passes % 2 == 0:
            with pytest.warns(UserWarning, match="between the backward passes of one step"):
                state.commit()
        else:
            optimizer.step()
            state.commit()  # a warning would be an error
        model.zero_grad()


def case_a_commit_of_a_torch_state_is_of_all_values_or_none():
    import torch

    import choros.torch as hvd

    class Failing(hvd.elastic.StateHandler):
        def save(self) -> None:
            raise hvd.elastic.HorovodInternalError("as if a rank was lost")

        def restore(self) -> None:
            pass

        sync = save

    registry = hvd.elastic.get_handler_registry()
    try:
        hvd.elastic.set_handler_registry([(list, Failing), *registry])
        state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), failing=[], step=0)
    finally:
        hvd.elastic.set_handler_registry(registry)
    before = state.model.weight.detach().clone()
    for change in (state.save, state.sync):
        state.model.weight.data.zero_()
        state.step = 7
        with pytest.raises(hvd.elastic.HorovodInternalError):
            change()
        state.restore()
        torch.testing.assert_close(state.model.weight.detach(), before)
        assert state.step == 0


def case_a_torch_state_is_synchronised_and_its_values_can_be_replaced():
    import torch

    import choros.torch as hvd

    state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), epoch=hvd.rank())
    state.sync()
    weight = state.model.weight.detach().numpy().copy()
    assert_same_on_all_ranks([weight])
    assert state.epoch == 0
    state.model = torch.nn.Linear(2, 1)
    other = state.model.weight.detach().numpy().copy()
    state.model.weight.data.zero_()
    state.restore()
    assert_same([state.model.weight.detach().numpy()], [other])

    class Handler(hvd.elastic.StateHandler):
        def save(self) -> None:
            pass

        def restore(self) -> None:
            self.value.append("restored")

        def sync(self) -> None:
            self.value.append("synchronised")

    registry = hvd.elastic.get_handler_registry()
    try:
        hvd.elastic.set_handler_registry([(list, Handler), *registry])
        values = hvd.elastic.TorchState(values=[]).values
        state = hvd.elastic.TorchState(values=values)
        state.commit()
        state.sync()
        state.restore()
        assert values == ["synchronised", "restored"]
    finally:
        hvd.elastic.set_handler_registry(registry)


def case_a_scheduler_of_any_class_stays_that_of_its_optimizer():
    import torch

    import choros.torch as hvd

    class Scheduler:
        """As those of timm."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.steps = optimizer, 0

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            vars(self).update(state_dict)

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    scheduler = Scheduler(optimizer)
    scheduler.steps = hvd.rank() + 4
    state = hvd.elastic.TorchState(optimizer=optimizer, scheduler=scheduler)
    state.sync()
    assert scheduler.steps == 4
    scheduler.steps = 7
    state.restore()
    assert (state.scheduler, scheduler.optimizer, scheduler.steps) == (scheduler, optimizer, 4)


def case_ranks_notice_changed_hosts_together():
    state = hvd.elastic.ObjectState(step=hvd.rank())
    state.check_host_updates()
    if hvd.rank() == 1:
        state.on_hosts_updated(0.0, 1)
    with pytest.raises(hvd.elastic.HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync
    state.check_host_updates()


def case_tensorflow_states():
    import tensorflow as tf

    import choros.tensorflow as hvd

    variable = tf.Variable([1.0 + hvd.rank()])
    state = hvd.elastic.TensorFlowState([variable], batch=hvd.rank())
    state.sync()
    assert (state.batch, variable.numpy().tolist()) == (0, [1.0])
    variable.assign([3.0])
    state.restore()
    assert variable.numpy().tolist() == [1.0]
    with pytest.raises(ConfigError, match="needs the variables"):
        hvd.elastic.TensorFlowState()
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="a graph of TensorFlow 1 has no elastic state"):
        hvd.elastic.TensorFlowState([tf.compat.v1.get_variable("of_graph", ())])
    own = model(hvd.rank())
    of_model = hvd.elastic.TensorFlowKerasState(own, own.optimizer, batch=hvd.rank())
    of_model.sync()
    assert_same_on_all_ranks(values(own))
    own.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), shard_state=True), "mse")
    own.optimizer.build(own.trainable_variables)
    with pytest.raises(ConfigError, match="TensorFlowState was given variables of an optimizer with shard_state"):
        hvd.elastic.TensorFlowState(own.variables + own.optimizer.variables)


def case_jax_parameters_are_objects():
    import jax.numpy as jnp

    import choros.jax as hvd

    state = hvd.elastic.ObjectState(params={"w": jnp.ones(2) * hvd.rank()}, step=0)
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(state.params["w"].tolist())
        state.params = {"w": state.params["w"] + 1}
        if len(calls) == 1:
            raise hvd.elastic.HorovodInternalError("as if a rank was lost")

    train(state)
    assert calls == [[0.0, 0.0], [0.0, 0.0]]
    assert state.params["w"].tolist() == [1.0, 1.0]


def case_the_sampler_of_a_state_of_objects_is_the_given_one():
    import choros.jax as hvd

    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.ObjectState(sampler=sampler, commits=0)
    assert state.sampler is sampler
    sampler.record_batch(0, 2)
    state.commits += 1
    state.commit()
    committed = state.committed()
    sampler.record_batch(1, 2)
    state.restore()
    assert (state.sampler, state.commits) == (sampler, 1)
    assert sorted(index for each in allgather_object(list(sampler)) for index in each) == list(range(4, 12))
    if hvd.rank() == 1:
        sampler.record_batch(1, 2)
    state.sync()
    assert sorted(index for each in allgather_object(list(sampler)) for index in each) == list(range(4, 12))
    other = hvd.elastic.ObjectState(sampler=hvd.elastic.ElasticSampler(range(12), shuffle=False), commits=0)
    other.use(committed)
    other.restore()
    assert (list(other.sampler), other.commits) == (list(sampler), 1)


def case_an_error_of_the_first_rank_is_raised_on_all():
    def fail() -> None:
        assert hvd.rank() == 0
        raise ConfigError("all commits are damaged.")

    with pytest.raises(ConfigError, match="damaged"):
        object_of_first(fail)
    assert object_of_first(hvd.rank) == 0
