import inspect
from pathlib import Path

import pytest

import choros
from choros.comm import request
from choros.comm.request import Request, caller, mismatch_text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Request("barrier"), Request("allreduce")),
        (Request("allreduce", "shape=(1,)"), Request("allreduce", "shape=(2,)")),
        (Request("allreduce", "", "a"), Request("allreduce", "", "b")),
        (Request("allreduce", "a"), Request("allreduce", "", "a")),
    ],
)
def test_requests_that_differ_have_digests_that_differ(one: Request, other: Request) -> None:
    assert one.digest != other.digest
    assert 0 <= one.digest < 2**63


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request("barrier"), "barrier()"),
        (Request("barrier", name="end"), "barrier(name='end')"),
        (Request("allreduce", "op=Sum", "x"), "allreduce(name='x', op=Sum)"),
    ],
)
def test_text(request_: Request, text: str) -> None:
    assert str(request_) == text


def test_caller_is_the_innermost_line_outside_of_choros() -> None:
    line = inspect.currentframe().f_lineno + 1
    assert caller() == f"{__file__}:{line}"


def test_caller_may_be_in_a_folder_beside_choros(monkeypatch: pytest.MonkeyPatch) -> None:
    # Elsewhere than in site-packages, where no script is.
    package = request._PACKAGE.replace(str(Path(choros.__file__).parents[1]), "/home/me")
    monkeypatch.setattr(request, "_PACKAGE", package)
    beside = "/home/me/choros_experiments/train.py"
    names = {"caller": caller}
    exec(compile("location = caller()", beside, "exec"), names)
    assert names["location"] == f"{beside}:1"


@pytest.mark.parametrize(("others", "advised"), [("shutdown()", True), ("gradients(float64[3])", False)])
def test_ranks_with_fewer_batches_are_told_what_lets_them_have_fewer(others: str, advised: bool) -> None:
    text = mismatch_text(["gradients(float32[3])", others], [0, 1])
    assert ("in fit with a choros callback, they take part" in text) is advised
