"""Kinds of data sets, with stand-ins for their packages; the real ones are in ``dataset_cases.py``."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import scipy.sparse

from choros.data import kinds
from choros.data.kinds import DataKind, LocalBatches, are_arrays, kind_of
from choros.data.rows import Part, Sharding, note_rows
from choros.errors import ConfigError


class Source:
    """The base class of a package's data sets."""


class Derived(Source):
    pass


PACKAGES = [
    ("keras", SimpleNamespace(utils=SimpleNamespace(PyDataset=Source)), "py_dataset"),
    ("tensorflow", SimpleNamespace(data=SimpleNamespace(Dataset=Source)), "tf_data"),
    ("torch.utils.data", SimpleNamespace(DataLoader=Source), "data_loader"),
    ("grain", SimpleNamespace(MapDataset=int, IterDataset=Source, DataLoader=str), "grain_data"),
]


@pytest.fixture(autouse=True)
def _no_package_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, package, _ in kinds._TABLE:
        monkeypatch.delitem(sys.modules, package, raising=False)


@pytest.mark.parametrize(("package", "stands_for", "kind"), PACKAGES)
def test_a_kind_is_found_by_the_classes_of_its_package(
    package: str, stands_for: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The modules import what stands_for is not.
    monkeypatch.setattr(kinds, "import_module", lambda module: SimpleNamespace(KIND=module))
    assert kind_of(Source()) == "choros.data.array_data"
    monkeypatch.setitem(sys.modules, package, stands_for)  # type: ignore[arg-type]
    for data in (Source(), Derived()):
        assert kind_of(data) == f"choros.data.{kind}"
    assert kind_of(object()) == "choros.data.array_data"


def test_data_sets_of_the_table_are_no_arrays_even_if_they_have_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "shape", (3,), raising=False)
    assert are_arrays(Source())
    monkeypatch.setitem(sys.modules, *PACKAGES[1][:2])  # type: ignore[arg-type]
    assert not are_arrays(Source())


@pytest.mark.parametrize("data", [np.zeros(3), (np.zeros(3), None), {"x": np.zeros(3)}, [np.zeros(3)], iter([]), 3])
def test_data_of_no_known_package_are_arrays(data: object) -> None:
    assert type(kind_of(data)).__name__ == "ArrayKind"


def test_finding_a_kind_and_splitting_arrays_loads_no_framework() -> None:
    script = """
import sys
import numpy as np
from choros.data.kinds import kind_of
from choros.data.rows import Part, Sharding
data = {"x": np.zeros(3)}
kind_of(data).shard(data, Sharding(Part(0, 2)))
loaded = {"tensorflow", "torch", "jax", "keras", "grain", "mpi4py"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class Numbers:
    """A data set that cannot be iterated itself."""

    def __init__(self, *batches: int) -> None:
        self.batches = [np.arange(rows) for rows in batches]


class NumbersKind(DataKind):
    """A kind with only the required methods, and ``batches``."""

    def shard(self, data: Numbers, sharding: Sharding) -> Numbers:
        return data

    def batches(self, data: Numbers):
        yield from data.batches


def test_the_other_methods_follow_from_the_batches() -> None:
    kind, data, part = NumbersKind(), Numbers(4, 4, 1), Part(1, 2)
    own = kind.local_batches(data, lambda: part)
    for _ in range(2):
        assert [rows.tolist() for rows in own] == [[2, 3], [2, 3], []]
    assert type(own) is LocalBatches
    with pytest.raises(TypeError, match="number of batches of this data set is not known"):
        len(own)
    assert [rows.tolist() for rows in kind.split(data, part)] == [[2, 3], [2, 3]]
    assert [rows.tolist() for rows in kind.split(Numbers(4, 1, 0, 4, 1), part)] == [[2, 3], [], [2, 3]]
    assert kind.batch_rows(data) is kind.padded(data) is None
    assert list(kind.sources(data)) == []
    text = r"a global batch of 1 examples is smaller than the 2 replicas .*; later batches may have fewer"
    with pytest.raises(ConfigError, match=text):
        list(kind.split(Numbers(1, 4), part))


@pytest.mark.parametrize("data", [np.zeros(3), (np.zeros(3),), {"x": np.zeros(3)}, "text", b"bytes", 3])
def test_arrays_are_no_batches(data: object) -> None:
    with pytest.raises(ConfigError, match="is no data set of batches"):
        kind_of(data).split(data, Part(0, 2))


def test_a_list_of_arrays_is_one_structure_to_shard_and_batches_to_a_strategy() -> None:
    data = [np.arange(4), np.arange(4)]
    assert [rows.tolist() for rows in kind_of(data).shard(data, Sharding(Part(0, 4)))] == [[0], [0]]
    assert [rows.tolist() for rows in kind_of(data).split(data, Part(1, 2))] == [[2, 3], [2, 3]]
    own = kind_of(data).local_batches(data, lambda: Part(0, 2))
    assert len(own) == 2


@pytest.mark.parametrize(("numbers", "warned"), [([[0, 3], [4, 2]], True), ([[0, 1], [2, 2]], False)])
def test_batches_whose_rows_name_rows_of_another_array_are_warned_of(numbers: list[list[int]], warned: bool) -> None:
    """Two bonds between five atoms; a shard of the atoms is not what a shard of the bonds names."""
    batch = {"atoms": np.zeros((5, 3)), "bonds": np.array(numbers), "y": None, "labels": np.zeros((0, 1))}
    expected = (
        pytest.warns(UserWarning, match="looks like numbers of another array's rows") if warned else nullcontext()
    )
    with patch.multiple("choros.data.rows", _differ=False), expected:
        note_rows(batch)
        note_rows({**batch, "sparse": scipy.sparse.csr_matrix(np.eye(7, dtype=int))})
