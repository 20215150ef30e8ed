"""Elastic training, for all frameworks."""

from choros.elastic.retry import run_fn
from choros.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run_fn"]
