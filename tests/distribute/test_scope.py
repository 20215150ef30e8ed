"""The scope stack, without strategies: any object with the attributes below can be entered."""

import threading
from types import SimpleNamespace

import pytest

from choros.distribute.scope import (
    current_replica,
    current_strategy,
    enter_fit,
    enter_scope,
    has_strategy,
    in_fit,
    in_replica,
)
from choros.errors import StrategyError

STRATEGY, OTHER = (SimpleNamespace(is_default=False, num_replicas_in_sync=1) for _ in range(2))
DEFAULT = SimpleNamespace(is_default=True, num_replicas_in_sync=1)


def state() -> tuple[object, object, bool, bool, bool]:
    return current_strategy(), current_replica(), has_strategy(), in_replica(), in_fit()


OUTSIDE = (None, None, False, False, False)


def test_the_topmost_entry_counts() -> None:
    assert state() == OUTSIDE
    with enter_scope(STRATEGY):
        assert state() == (STRATEGY, None, True, False, False)
        with enter_scope(STRATEGY, "replica"):
            assert state() == (STRATEGY, "replica", True, True, False)
            with enter_scope(STRATEGY):
                assert state() == (STRATEGY, None, True, False, False)
        with enter_fit():
            assert state() == (STRATEGY, None, True, False, True)
            with enter_scope(STRATEGY):
                assert in_fit()
            with enter_scope(STRATEGY, "replica"):
                assert not in_fit()
    assert state() == OUTSIDE


def test_the_default_strategy_is_only_entered_in_its_replica() -> None:
    with enter_scope(DEFAULT), enter_fit():
        assert state() == OUTSIDE
    with enter_scope(DEFAULT, "replica"), enter_fit():
        assert state() == (DEFAULT, "replica", False, False, False)


def test_one_strategy_at_a_time_and_thread() -> None:
    with enter_scope(STRATEGY):
        with pytest.raises(StrategyError, match="one strategy's scope at a time"), enter_scope(OTHER):
            pass
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
        assert seen == [OUTSIDE]


def test_an_error_leaves_the_scope() -> None:
    with pytest.raises(ZeroDivisionError), enter_scope(STRATEGY), enter_fit():
        raise ZeroDivisionError
    assert state() == OUTSIDE
