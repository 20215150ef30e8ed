import numpy as np
import pytest

from choros.arrays import adapter_of, device_adapter, framework_adapter
from choros.errors import ConfigError
from harness import FRAMEWORKS, Job, check_case, on

ADAPTERS = "arrays.adapter_cases"


@pytest.mark.each_framework
@on(Job(2), *(Job(2, framework) for framework in FRAMEWORKS), cases=ADAPTERS)
def test_adapter(case: str, job: Job) -> None:
    """One rank would do; but these are up for other tests."""
    check_case(ADAPTERS, case, job)


@pytest.mark.parametrize("value", [1, 2.5, True, [1.0], (1, 2), np.float32(1), np.ones(3), None])
def test_values_of_no_framework_use_the_numpy_adapter(value: object) -> None:
    assert adapter_of(value) is framework_adapter("numpy")


def test_numbers_become_numbers_and_arrays_become_arrays() -> None:
    adapter = framework_adapter("numpy")
    for number in (True, 3, 2.5):
        back = adapter.from_host(np.asarray(number), number)
        assert (back, type(back)) == (number, type(number))
    assert adapter.from_host(np.ones(1), 1.0).tolist() == [1.0]
    assert isinstance(adapter.from_host(np.asarray(1), np.asarray(1)), np.ndarray)


def test_unknown_framework_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mxnet' .* expected one of torch, tensorflow, jax"):
        framework_adapter("mxnet")


def test_arrays_in_host_memory_are_not_reduced_on_a_device() -> None:
    with pytest.raises(ConfigError, match="numpy are reduced through host memory"):
        device_adapter("numpy")
