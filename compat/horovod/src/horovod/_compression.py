"""The compressions of gradients, under Horovod's names of them."""

from choros.parallel.compression import Compression, Compressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

NoneCompressor = Compression.none
FP16Compressor = Compression.fp16
