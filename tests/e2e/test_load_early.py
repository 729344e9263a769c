"""Loads onto a compiled model before its first call, which partitions what was loaded; states of all kinds of optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, tokens
from optimizers import OPTIMIZERS
from same_leaves import assert_equal
from tier_twins import check_same, twins
from tiers import Placement, compiled, options_for, sundry
from training import BACKEND, adamw, plain_step

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.mark.parametrize("placement", [("nvme",) * 3, ("device", "device", "nvme"), ("device",) * 3])
def test_before_the_first_call(placement: Placement, tmp_path: Path) -> None:
    ours, optimizer, eager, other = twins(tmp_path, placement)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, extra={"step": 2})
    fresh = sundry()
    compiled(fresh, options_for(placement, tmp_path))
    its = adamw(fresh.parameters())
    assert zinf_compile.load(folder, fresh, its) == {"step": 2}
    check_same((fresh, its, eager, other), step=2, steps=2)


@pytest.mark.keeps_graphs
@pytest.mark.parametrize("placement", [("nvme",) * 3, ("device",) * 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_all_optimizers(name: str, placement: Placement, drive: Path, tmp_path: Path) -> None:
    """The graphs are those of one model; above, what is loaded is there before any."""

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = TiedWords()
        model.compile(backend=BACKEND, options=options_for(placement, drive, piece=64))
        return model, OPTIMIZERS[name](model.parameters())

    def train(model: Any, optimizer: Any, *steps: int) -> None:
        for step in steps:
            plain_step(model, optimizer, tokens(step))

    def whole(model: Any, optimizer: Any) -> Any:
        return zinf_compile.full_state_dict(model), zinf_compile.full_optimizer_state_dict(optimizer)

    ours = build(0)
    train(*ours, 0, 1)
    folder = zinf_compile.save(tmp_path / "saved", *ours)
    train(*ours, 2, 3)
    for before in ((), (9,)):
        again = build(5)
        train(*again, *before)
        zinf_compile.load(folder, *again)
        train(*again, 2, 3)
        assert_equal(whole(*again), whole(*ours))
