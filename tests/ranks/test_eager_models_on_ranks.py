"""Models of which Dynamo compiles nothing, on several ranks, each of which would train for itself."""

from __future__ import annotations

import pytest
import rank_eager_models
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_the_first_step_is_refused() -> None:
    for error in run_ranks(rank_eager_models.step, 2):
        assert "has compiled nothing of Looped that uses its parameters, before this step of SGD" in error
        assert "no gradient is averaged over the 2 ranks: let a module of its own have what breaks the graph" in error


@pytest.mark.filterwarnings("ignore:no compiled graph uses")
def test_called_by_a_module_of_its_own_it_trains_as_in_eager() -> None:
    run_ranks(rank_eager_models.train, 2)
