"""Timelines of training: epochs, steps and buckets are slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

import choros.keras as hvd
import choros.torch as hvd_torch
from choros.settings import current
from choros.trace.cli import rank_times, summary_text
from choros.trace.trace import BUCKETS, EPOCHS, STEPS
from observe.timelines import read

FEATURES, BATCH = 4, 8


def case_fit(tmp_path: Path) -> None:
    """Rank 0 has 5 batches, the last of one row, and rank 1 has 3; both see 5 steps."""
    file = hvd.broadcast_object(tmp_path, 0) / "run.json"
    rows = 4 * BATCH + 1 if hvd.rank() == 0 else 3 * BATCH
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    hvd.start_timeline(file)
    model.fit(
        np.ones((rows, FEATURES), np.float32),
        np.ones((rows, 1), np.float32),
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    hvd.stop_timeline()
    trace = read(file)
    for rank in (0, 1):
        found = {
            track: [each for each in trace.intervals if (each.rank, each.track) == (rank, track)]
            for track in (EPOCHS, STEPS, BUCKETS)
        }
        assert [each.name.split(" of ")[0] for each in found[EPOCHS]] == ["epoch 0", "epoch 1"]
        assert [each.name.split(" of ")[0] for each in found[STEPS]] == [f"step {step}" for step in range(1, 11)]
        assert [each.details["examples"] for each in found[STEPS]][:5] == [
            BATCH, BATCH, BATCH, BATCH if rank == 0 else 0, 1 if rank == 0 else 0,
        ]  # fmt: skip
        for step, bucket in zip(found[STEPS], found[BUCKETS], strict=True):
            assert step.began <= bucket.began <= bucket.ended <= step.ended
        for step in found[STEPS]:
            assert any(epoch.began <= step.began <= step.ended <= epoch.ended for epoch in found[EPOCHS])
    assert [each.steps for each in rank_times(trace)] == [10, 10]
    assert "median step" in summary_text(trace)
    hvd.barrier()


def case_buckets_during_the_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choros.settings._config", replace(current(), overlap=True))
    monkeypatch.setattr("choros.parallel.reduce.plan._BUCKET_BYTES", 1024)
    file = hvd.broadcast_object(tmp_path, 0) / "run.json"
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    hvd_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd_torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd_torch.start_timeline(file)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    hvd_torch.stop_timeline()
    trace = read(file)
    for rank in (0, 1):
        steps = [each for each in trace.intervals if (each.rank, each.track) == (rank, STEPS)]
        buckets = [each.name for each in trace.intervals if (each.rank, each.track) == (rank, BUCKETS)]
        assert len(steps) == 3
        assert len(set(buckets)) > 1
        assert len(buckets) == 3 * len(set(buckets))
    hvd.barrier()
