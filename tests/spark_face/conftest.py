"""Tests on a real Spark: ``pytest -m spark tests/spark_face`` runs them, on one cluster; other calls skip them."""

from __future__ import annotations

import pytest

from spark_face.digits import digits as make_digits
from spark_face.digits import vectors
from spark_face.sessions import cluster, missing

REASON = "Spark's tests are a stage of their own: pytest -m spark tests/spark_face"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = missing() if "spark" in config.getoption("markexpr", "") else REASON
    for item in items:
        if item.get_closest_marker("spark") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("spark")) as own:
        yield own


@pytest.fixture(scope="session")
def digits(spark):
    """A DataFrame of images, and its arrays."""
    x, y = make_digits()
    return vectors(spark.session, x, y).cache(), x, y
