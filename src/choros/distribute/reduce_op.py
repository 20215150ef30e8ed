"""The reduction of a strategy's per-replica values."""

from __future__ import annotations

import enum

from choros.comm import Reduction
from choros.errors import ConfigError

__all__ = ["ReduceOp"]


class ReduceOp(enum.Enum):
    """``tf.distribute.ReduceOp``: ``SUM`` or ``MEAN``.

    Example:
        >>> ReduceOp.of("sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, given: ReduceOp | str) -> ReduceOp:
        """Returns the operation for a member, a name, or a member of TensorFlow's own ``ReduceOp``.

        Raises:
            ConfigError: ``given`` is none of these.
        """
        name = str(getattr(given, "name", given)).upper()
        if name not in cls.__members__:
            raise ConfigError(f"reduce_op={given!r}: expected ReduceOp.SUM or ReduceOp.MEAN.")
        return cls[name]

    @property
    def engine_op(self) -> Reduction:
        """The engine's operation of the same meaning."""
        return Reduction.SUM if self is ReduceOp.SUM else Reduction.AVERAGE
