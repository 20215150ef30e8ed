"""The PyTorch API on two ranks; the cases are in ``torch_cases.py``. On three: ``join()``, in ``join_cases.py``.

Collectives, in ``collective_cases.py``, run on both.
"""

import pytest

from choros import settings
from choros.parallel.reduce.plan import bucket_bytes
from choros.settings import Config
from harness import Job, check_case, on

MODULE = "torch_face.torch_cases"
COLLECTIVES = "torch_face.collective_cases"


@on(Job(2, "torch"), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(Job(3, "torch"), cases="torch_face.join_cases")
def test_three_ranks(case: str, job: Job) -> None:
    check_case("torch_face.join_cases", case, job)


@on(Job(2, "torch"), cases=COLLECTIVES)
def test_collectives(case: str, job: Job) -> None:
    check_case(COLLECTIVES, case, job)


@on(Job(3, "torch"))
@pytest.mark.parametrize("case", ["case_sparse_tensors", "case_errors_are_those_that_scripts_catch"])
def test_collectives_of_three_ranks(case: str, job: Job) -> None:
    check_case(COLLECTIVES, case, job)


@pytest.mark.parametrize(
    ("setting", "devices", "expected"),
    [
        ("auto", ["cpu", "cpu"], False),
        ("auto", ["cpu", "cuda"], True),
        ("auto", [], False),
        ("0", ["cuda"], False),
        ("1", ["cpu"], True),
    ],
)
def test_overlap(setting: str, devices: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_config", Config.from_environ({"CHOROS_OVERLAP": setting}))
    accelerated = any(device != "cpu" for device in devices)
    assert (bucket_bytes(accelerated=accelerated, device=None) is not None) is expected
