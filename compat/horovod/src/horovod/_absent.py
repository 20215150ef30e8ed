"""The parts of Horovod that choros does not have, and what to use instead."""

__all__ = ["not_here"]

_INSTEAD = {
    "horovod.data": "load batches in background threads with torch.utils.data.DataLoader or tf.data.",
    "horovod.mxnet": "MXNet has ended; use horovod.torch, horovod.tensorflow or horovod.keras.",
    "horovod.tensorflow.data": "choros does not start tf.data's service; shard the data set on each rank, with "
    "dataset.shard(hvd.size(), hvd.rank()) or choros.keras.shard.",
}


def not_here(module: str) -> ImportError:
    """Returns the error of an import of ``module``."""
    return ImportError(f"{module} is not part of choros: {_INSTEAD[module]}", name=module)
