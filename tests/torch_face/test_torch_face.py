"""The PyTorch API on two ranks; the cases are in ``torch_cases.py``."""

import pytest

from choros.parallel.reduce.reducer import bucket_bytes
from harness import FRAMEWORKS, case_names, check_case

MODULE = "torch_face.torch_cases"


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="torch is not in CHOROS_TEST_FRAMEWORKS")
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str) -> None:
    check_case(MODULE, 2, case, "torch")


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
    monkeypatch.setenv("CHOROS_OVERLAP", setting)
    accelerated = any(device != "cpu" for device in devices)
    assert (bucket_bytes(accelerated=accelerated, device=None) is not None) is expected
