"""Collections are rare while a plan is made, and as before behind it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zinf_compile.plan.collector import OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def _own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_inside() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collections():
        assert gc.get_threshold() == (OBJECTS, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_leaves_the_thresholds_as_before() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="inside"), rare_collections():
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("objects", [0, 5 * OBJECTS])
def test_what_the_process_has_set_further_stays(objects: int) -> None:
    gc.set_threshold(objects, 10, 10)
    with rare_collections():
        assert gc.get_threshold() == (objects, 10, 10)
    assert gc.get_threshold() == (objects, 10, 10)
