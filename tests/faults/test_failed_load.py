"""Loads and steps that end in their middle: nobody computes with what they left, and `zinf_compile.load` is the way out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from damaged_saves import damage_a_state
from faults import failing, offloaded_of
from tier_twins import check_same, compare, twins
from tiers import Placement, context_of, words

import zinf_compile
from zinf_compile.errors import CheckpointError, StepFailedError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

PLACEMENTS: list[Placement] = [("nvme",) * 3, ("device",) * 3, ("device", "device", "nvme")]


def backward(model: Any, step: int) -> None:
    for micro in range(2):
        model(words(step, micro)).backward()


def assert_refused(model: Any, optimizer: Any, said: str) -> None:
    """Neither a forward nor a step goes on, again and again."""
    for _ in range(2):
        with pytest.raises(StepFailedError, match=said):
            model(words(0, 0))
        with pytest.raises(StepFailedError, match=said):
            optimizer.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_load_that_finds_a_damaged_file(placement: Placement, tmp_path: Path) -> None:
    ours, optimizer, _, _ = trained = twins(tmp_path, placement)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, extra={"step": 2}, wait=True)
    good = shutil.copytree(folder, tmp_path / "good")
    damage_a_state(folder)
    with pytest.raises(CheckpointError, match=r"is damaged: the checksum of \S+ differs"):
        zinf_compile.load(folder, ours, optimizer)
    assert_refused(ours, optimizer, r"loading \S+ ended in its middle.*by zinf_compile\.load, and go on from there")
    optimizer.zero_grad()
    assert zinf_compile.load(good, ours, optimizer) == {"step": 2}
    compare(trained)
    check_same(trained, step=2, steps=2)


@pytest.mark.parametrize("number", [1, 5, 12])
def test_a_drive_that_fails_during_a_load(number: int, tmp_path: Path) -> None:
    ours, optimizer, _, _ = trained = twins(tmp_path)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, wait=True)
    with failing(context_of(ours).engine, "write", number), pytest.raises(StoreError):
        zinf_compile.load(folder, ours, optimizer)
    assert_refused(ours, optimizer, "ended in its middle")
    zinf_compile.load(folder, ours, optimizer)
    check_same(trained, step=2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_that_failed_names_the_last_checkpoint(late: bool, loaded: bool, tmp_path: Path) -> None:
    ours, optimizer, _, _ = trained = twins(tmp_path)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, wait=True)
    if loaded:
        zinf_compile.save(tmp_path / "other", ours, optimizer, wait=True)
        zinf_compile.load(folder, ours, optimizer)
    way_out = re.escape(f"go on from there: zinf_compile.load({str(folder)!r}, model, optimizer)")
    for _ in range(2):
        backward(ours, 2)
        (states,) = offloaded_of(optimizer)
        states._defers = late

        def step() -> None:
            optimizer.step()
            zinf_compile.synchronize()

        with (
            failing(context_of(ours).engine, "read", 9),
            pytest.raises(StepFailedError, match=rf"in the middle.*{way_out}.*Cause"),
        ):
            step()
        assert_refused(ours, optimizer, f"in the middle.*{way_out}")
        zinf_compile.load(folder, ours, optimizer)
        optimizer.zero_grad()
    check_same(trained, step=2, steps=2)


def test_an_update_that_did_not_reach_the_drive(tmp_path: Path) -> None:
    ours, optimizer, _, _ = trained = twins(tmp_path)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, wait=True)
    (states,) = offloaded_of(optimizer)
    states._defers, states._forward = False, True
    backward(ours, 2)
    with failing(context_of(ours).engine, "write", 25):
        optimizer.step()
    optimizer.zero_grad()
    backward(ours, 3)
    with pytest.raises(StepFailedError, match=rf"lost in part.*{re.escape(str(folder))}.*exp_avg of"):
        optimizer.step()
    zinf_compile.load(folder, ours, optimizer)
    optimizer.zero_grad()
    check_same(trained, step=2)


def test_without_a_checkpoint_none_is_named(tmp_path: Path) -> None:
    ours, optimizer, _, _ = twins(tmp_path)
    zinf_compile.synchronize()
    backward(ours, 2)

    def step() -> None:
        optimizer.step()
        zinf_compile.synchronize()

    with failing(context_of(ours).engine, "read", 9), pytest.raises(StepFailedError) as error:
        step()
    assert "zinf_compile.load(" not in str(error.value)
