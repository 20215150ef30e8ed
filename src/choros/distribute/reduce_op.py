"""How a strategy combines the values of its replicas."""

from __future__ import annotations

import enum

from choros.comm import Reduction
from choros.errors import ConfigError

__all__ = ["ReduceOp"]


class ReduceOp(enum.Enum):
    """``tf.distribute.ReduceOp``: there are two.

    Example:
        >>> ReduceOp.of("sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, given: ReduceOp | str) -> ReduceOp:
        """The operation that a user names, as a member or as a word.

        Raises:
            ConfigError: it is neither; TensorFlow's own ``ReduceOp`` counts as the word it stands for.
        """
        name = str(getattr(given, "name", given)).upper()
        if name not in cls.__members__:
            raise ConfigError(
                f"reduce_op={given!r}: values of replicas are combined with ReduceOp.SUM or ReduceOp.MEAN."
            )
        return cls[name]

    @property
    def engine_op(self) -> Reduction:
        """What the layers below call it."""
        return Reduction.SUM if self is ReduceOp.SUM else Reduction.AVERAGE
