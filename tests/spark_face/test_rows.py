"""A DataFrame's rows on ranks: each once, in an order that all know."""

from __future__ import annotations

import numpy as np
import pytest

import choros.spark
from choros.data.rows import order_of
from choros.errors import ConfigError
from spark_face.training import TORCH, built, weights_of_rows

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ROWS, BATCH = 1_000_000, 4096


def read(rows):
    import choros.keras as hvd

    hvd.init()
    found = rows.arrays("id", "x")
    right = True
    parts = []
    for own, x in hvd.shard(found, batch_size=BATCH, shuffle=True, seed=3):
        right = right and x.shape[1] == 4 and bool((x[:, 3] == (own * 3).astype("float32")).all())
        parts.append(np.array(own))
    return parts, right, type(found[0]).__name__


def test_a_million_rows_are_sharded(spark, tmp_path):
    """Each global batch has the rows of the shared order, of which each rank has its own."""
    from pyspark.sql import functions as F  # noqa: N812

    ids = spark.session.range(ROWS)
    df = ids.withColumn("x", F.array(*[(F.col("id") * k).cast("float") for k in range(4)]))
    rows = choros.spark.write_parquet(df, tmp_path / "rows")
    assert len(rows) == ROWS
    parts, right, kinds = zip(*choros.spark.run(read, (rows,), num_proc=2, env=TORCH), strict=True)
    assert right == (True, True)
    assert kinds == ("memmap", "memmap")
    together = np.concatenate([np.concatenate(batch) for batch in zip(*parts, strict=True)])
    np.testing.assert_array_equal(together, order_of(ROWS, 3, 0))  # whose values are its own: id is the row's number


def test_columns(spark, tmp_path):
    from pyspark.ml.linalg import Vectors

    rows = [(i, i / 2, bool(i % 2), [float(i), 1.0], Vectors.sparse(3, {i % 3: float(i)}), "a") for i in range(10)]
    df = spark.session.createDataFrame(spark.context.parallelize(rows, 3), ["i", "f", "b", "a", "v", "s"])
    written = choros.spark.write_parquet(df, tmp_path / "rows", ["i", "f", "b", "a", "v"])
    i, f, b, a, v = written.arrays()
    order = list(range(10))  # over three files
    assert i.tolist() == order
    assert f.tolist() == [each / 2 for each in order]
    assert b.tolist() == [bool(each % 2) for each in order]
    assert a.tolist() == [[each, 1.0] for each in order]
    assert v.tolist() == [[each * (k == each % 3) for k in range(3)] for each in order]
    assert written.arrays("f")[0].tolist() == f.tolist()
    for columns, message in ((["s"], "'s' is a string"), (["no"], "no column 'no'")):
        with pytest.raises(ConfigError, match=message):
            choros.spark.write_parquet(df, tmp_path / "other", columns)
    written.delete()
    with pytest.raises((ConfigError, FileNotFoundError)):
        written.arrays()


@pytest.mark.parametrize(
    ("values", "message"),
    [([[1.0], [1.0, 2.0]], "different lengths, such as"), ([[1.0], None], "has nulls"), ([], "no rows")],
)
def test_rows_that_are_no_arrays(spark, tmp_path, values, message):
    df = spark.session.createDataFrame([(each,) for each in values], "x array<double>").coalesce(1)
    rows = choros.spark.write_parquet(df, tmp_path / "rows")
    with pytest.raises(ConfigError, match=message):
        rows.arrays()


def test_training_from_a_data_frame_is_that_of_plain_keras(spark, tmp_path, digits):
    df, x, y = digits
    rows = choros.spark.write_parquet(df, tmp_path / "rows", ["features", "label"])
    found = choros.spark.run(weights_of_rows, (rows,), num_proc=2, env=TORCH)
    expected = built_and_fitted(x, y)
    for own in found:
        for weight, other in zip(own, expected, strict=True):
            np.testing.assert_allclose(weight, other, rtol=0, atol=1e-5)


def built_and_fitted(x, y):
    model = choros.spark.run(plain, (x, y), num_proc=1, env=TORCH)
    return model[0]


def plain(x, y):
    import keras

    model = built(keras, 64, 10)
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()
