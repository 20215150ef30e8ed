"""Images of digits, made without a download: 8 × 8 pixels, ten classes with a pattern each, and noise."""

from __future__ import annotations


def digits(number=700):
    """Returns the images as rows of 64 values of 0 … 1, and their labels."""
    import numpy as np

    random = np.random.default_rng(5)
    patterns = random.uniform(size=(10, 64))
    labels = random.integers(10, size=number)
    return (0.7 * patterns[labels] + 0.3 * random.uniform(size=(number, 64))), labels.astype("int64")


def vectors(session, x, y):
    """Returns them as a DataFrame of vectors and numbers, as MNIST is in Horovod's examples."""
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense(row), int(label)) for row, label in zip(x.tolist(), y.tolist(), strict=True)]
    return session.createDataFrame(rows, ["features", "label"]).coalesce(1)
