"""What users do with a model whose states are off the device, on a device that is late; see tests/tiers."""

from __future__ import annotations

from collections.abc import Iterator

import late
import pytest
import torch
from places import on
from rank_late import LONGEST_S, check
from tier_features import FEATURES, Compile, several_graphs
from tiers import compiled, options_for

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

REFUSED = {"several graphs: checkpoint"}
"""PyTorch traces the random numbers of a checkpointed function for its own devices alone. [torch 2.13] Without them, below."""


@pytest.fixture(scope="module", params=["host", pytest.param("nvme", marks=pytest.mark.thorough)])
def away(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return what compiles a model with all its states on one tier."""
    torch.compiler.reset()
    folder = tmp_path_factory.mktemp("drive")
    return lambda model: compiled(model, options_for((request.param,) * 3, folder, piece=96))


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with late.delays(LONGEST_S, seed=1, chance=0.3), on("late"):
        yield
        torch.accelerator.synchronize()
    check()


@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - REFUSED))
def test_feature(feature: str, away: Compile) -> None:
    FEATURES[feature](away)


def test_a_checkpointed_function_that_draws_nothing(away: Compile) -> None:
    several_graphs("checkpoint_without_dropout", away)
