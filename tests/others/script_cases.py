"""Scripts on both roads, against the same script in one process without choros."""

from __future__ import annotations

import functools
import importlib

import keras
import pytest

from others.roads import ROADS, Plain, Road
from others.scripts import SCRIPTS
from others.trained import Trained
from ranks.reference import of_one_rank
from training.matrix import BOUND
from training.matrix_cases import difference


@functools.cache
def plain(script: str) -> Trained:
    return of_one_rank(lambda: trained(script, Plain()))


def trained(script: str, road: Road) -> Trained:
    keras.utils.set_random_seed(1)
    return importlib.import_module(f"others.{script}").train(road)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("script", SCRIPTS)
def case_trains_as_plain(script: str, road: str):
    expected = plain(script)
    found = difference(trained(script, ROADS[road]()), expected)
    assert max(found) <= BOUND, found
