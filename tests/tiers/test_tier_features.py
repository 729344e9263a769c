"""What users do with a model, with all its states away from the device: the numbers of eager, bit by bit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from growth import train_for_long, used
from marks import more
from tier_features import FEATURES, Compile
from tiers import compiled, context_of, options_for
from torch import nn

from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]
TIERS = ["nvme", pytest.param("host", marks=pytest.mark.tiers), "nvme without a device"]


@pytest.fixture(scope="module", params=TIERS)
def away(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return what compiles a model with all its states on one tier."""
    torch.compiler.reset()
    with all_on(request.param, tmp_path_factory.mktemp("drive")) as compiles:
        yield compiles


@contextlib.contextmanager
def all_on(where: str, folder: Path) -> Iterator[Compile]:
    """Yield what compiles a model with all its states on one tier, beside a device unless `where` says without one."""
    tier, *without = where.split()
    with contextlib.nullcontext() if without else simulating(SimulatedDevice()):
        yield lambda model: compiled(model, options_for((tier, tier, tier), folder, piece=96))


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, away: Compile) -> None:
    FEATURES[feature](away)


def held(model: nn.Module) -> dict[str, int]:
    """Return the bytes held on the device, without staging: how much of it is kept depends on how many blocks ever met."""
    return {kind: count for kind, count in context_of(model).memory.ledger.now().items() if kind != "bounce"}


@pytest.mark.slow
@pytest.mark.parametrize("where", [*TIERS[:-1], more(TIERS[-1])])
def test_nothing_grows_over_many_steps_and_models(where: str, tmp_path: Path) -> None:
    with all_on(where, tmp_path) as away:
        assert_nothing_grows(away, tmp_path)


def assert_nothing_grows(away: Compile, tmp_path: Path) -> None:
    """Take many steps with a model, and a step with each of several: as much is in use as before."""
    steps, models = train_for_long(away, lambda model: (used(tmp_path), held(model)))
    assert steps[-1] == steps[0]
    assert models[-1][0] == models[1][0]
    assert models[-1][0][1] == steps[0][0][1], "files of the dropped models are gone"
    torch.compiler.reset()
    gc.collect()
    assert used(tmp_path)[1] == 0
