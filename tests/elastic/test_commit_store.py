"""Commits on disk: what they hold, and what is loaded after kills and damages."""

import contextlib
import errno
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from choros.elastic.commit_store import CommitStore
from choros.errors import ConfigError
from ranks.environment import python_path

SCRIPT = Path(__file__).with_name("killed_committers.py")


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    dtypes = (
        np.float32,
        np.float64,
        np.int8,
        np.uint16,
        np.bool_,
        np.complex64,
        "U3",
        "S2",
        "M8[s]",
        ml_dtypes.bfloat16,
    )
    arrays = [np.zeros((2, 3), dtype) for dtype in (*dtypes, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)]
    arrays += [np.arange(6.0).reshape(2, 3).T, np.array(1.5, ml_dtypes.bfloat16), np.zeros((0, 4)), np.float32(0.1)]
    plain = {
        "tuple": (1, (2.5, None), [True, "χορός"]),
        "numbers": {0: math.inf, -1: 2**70, "array": {"dict": []}},
        "bytes": b"\x00\xff",
        "empty": [{}, [], (), ""],
    }
    store = CommitStore(tmp_path / "commits")
    assert store.write({"arrays": arrays, "plain": plain}) == 1
    state = store.load_last()
    assert state["plain"] == plain
    for loaded, array in zip(state["arrays"], arrays, strict=True):
        assert (type(loaded), loaded.dtype, loaded.shape) == (type(array), array.dtype, array.shape)
        assert loaded.tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None]), {(1, 2): 3}])
def test_what_a_commit_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path, value) -> None:
    with pytest.raises(ConfigError, match=r"state\['callbacks'\]\[1\] is .* which a commit cannot hold"):
        CommitStore(tmp_path).write({"callbacks": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    store = CommitStore(tmp_path)
    assert store.load_last() is None
    assert [store.write({"epoch": epoch}) for epoch in range(4)] == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commit-00000003.npz", "commit-00000004.npz"]


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EIO])
def test_what_cannot_be_written_any_more_is_reported_and_the_last_commit_stays(
    problem: int, tmp_path: Path, caplog, monkeypatch
) -> None:
    CommitStore(tmp_path).write({"step": 1})  # another rank's, which was lost

    def fail(path: Path, _state: object) -> None:
        path.write_bytes(b"begun")
        raise OSError(problem, "it is so", str(path))

    store = CommitStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("choros.elastic.commit_store.write_state", fail)
        assert store.write({"step": 2}) is None
    text = f"commit 2 in {tmp_path} is not written, training goes on without it: [Errno {problem}]"
    assert text in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["commit-00000001.npz"]
    assert store.load_last() == {"step": 1}
    assert store.write({"step": 3}) == 2


@pytest.mark.parametrize(("problem", "raises"), [(errno.ENOSPC, False), (errno.EROFS, True)])
def test_a_first_commit_that_cannot_be_written(problem: int, raises: bool, tmp_path: Path, monkeypatch) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(problem, "it is so", str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match="it is so") if raises else contextlib.nullcontext():
        assert CommitStore(tmp_path / "commits").write({"step": 1}) is None


def test_of_a_damaged_commit_nothing_is_loaded(tmp_path: Path, caplog) -> None:
    store, rng = CommitStore(tmp_path), random.Random(7)
    for epoch in (1, 2):
        store.write({"epoch": epoch, "weights": np.arange(100.0) + epoch})
    file = tmp_path / "commit-00000002.npz"
    whole = file.read_bytes()
    for _ in range(100):
        damaged = bytearray(whole)
        if rng.random() < 0.5:
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        else:
            del damaged[rng.randrange(len(whole)) :]
        file.write_bytes(damaged)
        state = store.load_last()
        assert state["epoch"] in (1, 2)
        np.testing.assert_array_equal(state["weights"], np.arange(100.0) + state["epoch"])
    assert "commit-00000002.npz is damaged, and not loaded" in caplog.text
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="has 2 commits, and all are damaged"):
        store.load_last()


def test_after_50_kills_of_the_writer_the_last_complete_commit_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path, "50"]
    environ = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(ended.stdout)
    assert len(found["results"]) == 50
    assert [result for result in found["results"] if result[1] not in (result[0], result[0] + 1) or not result[2]] == []
    last = found["results"][-1][1]
    assert found["left"] == [f"commit-{number:08}.npz" for number in (last, last + 1)]
