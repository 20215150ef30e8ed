"""Gradient compression: one interface, one module per algorithm.

Arrays that cannot be compressed, or are too small to gain from it, are sent uncompressed (``SelectiveCompressor``)::

    Compressor ─creates─► Exchange, which keeps buffers and residuals from step to step
    ├── NoCompression, Float16      compressor.py  fused_exchange: an allreduce in that dtype
    └── SelectiveCompressor
        ├── VectorCompressor                       sums arrays that are concatenated to one float32 vector
        │   ├── Bfloat16, Int8      sliced.py      in slices, as an allreduce does
        │   └── TopK                top_k.py       of which it gathers the largest elements
        └── PowerSGD                power_sgd.py   two small allreduces for all matrices
"""

from choros.errors import ConfigError
from choros.parallel.compression.compressor import Compressor, Float16, NoCompression
from choros.parallel.compression.power_sgd import PowerSGD
from choros.parallel.compression.sliced import Bfloat16, Int8
from choros.parallel.compression.top_k import TopK

__all__ = ["Compression", "Compressor", "check_compressor"]


class Compression:
    """The compressions of gradients; ``none`` and ``fp16`` are Horovod's.

    ========================  ====================  ======================================================
    ``none``                  4 bytes per element   uncompressed
    ``fp16``                  2                     values are averaged before they are sent, so that their
                                                    sum does not overflow; values below 6e-8 become 0
    ``bf16``                  2                     summed in float32 and rounded once: no overflow
    ``int8``                  1.02                  blocks of 256 share a scale; error feedback
    ``top_k(ratio=0.01)``     8 × ``ratio``         the largest elements; error feedback
    ``power_sgd(rank=4)``     4 × rank × (n + m)    of an n × m matrix; error feedback
    ========================  ====================  ======================================================

    Example:
        >>> from choros.parallel.reduce.plan import ReduceConfig
        >>> from choros.parallel.reduce.reducer import GradientReducer
        >>> reducer = GradientReducer(ReduceConfig(compressor=Compression.power_sgd(rank=2)))
    """

    none: Compressor = NoCompression()
    fp16: Compressor = Float16()
    bf16: Compressor = Bfloat16()
    int8: Compressor = Int8()

    @staticmethod
    def top_k(ratio: float = 0.01) -> Compressor:
        """See ``TopK``."""
        return TopK(ratio)

    @staticmethod
    def power_sgd(rank: int = 4) -> Compressor:
        """See ``PowerSGD``."""
        return PowerSGD(rank)


def check_compressor(value: object) -> None:
    """Raises a ConfigError unless ``value`` is a compression."""
    if isinstance(value, Compressor):
        return
    members = {name: each for name, each in vars(Compression).items() if not name.startswith("_")}
    names = [f".{name}(…)" if isinstance(each, staticmethod) else f".{name}" for name, each in members.items()]
    raise ConfigError(
        f"compression={getattr(value, '__name__', repr(value))} is none of Compression's: expected "
        f"Compression{', '.join(names[:-1])} or {names[-1]}. Compressors of one's own, as Horovod takes them, are not "
        "supported: write fp16 or bf16 for a cast."
    )
