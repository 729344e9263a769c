"""`activations="auto"` makes values again where that costs less than moving, or nothing can move; the bits are keeping's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_blocks import ROWS, VALUE, WIDTH, WORDS, Run, keep_all, least, machine, same

import zinf_compile
from zinf_compile.errors import BudgetError, PlanError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.fixture(scope="module")
def on_drive(drive: Path) -> dict[str, Any]:
    """Return options with one folder for all tests: a cap is asked for once."""
    return {**WORDS, "nvme": str(drive)}


def test_without_a_drive_what_has_no_room_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """From the cap on that is named everything trains, with the bits of keeping; larger caps make less again, at last nothing."""
    kept, made_again = least({**WORDS, "activations": "keep"}), least(WORDS)
    assert made_again < kept // 2
    expected = keep_all()
    before = None
    for cap in (made_again, (made_again + kept) // 2, kept):
        run = Run({**WORDS, "device_memory": cap})
        with caplog.at_level("INFO", logger="zinf_compile"):
            run.step()
        assert same(run, expected)
        again = run.decided["recompute"]
        assert run.decided["nvme"] == 0
        assert run.decided["keep"] > 0
        said = re.search(r"plan for activations .*\n  activations  keep \d+%, recompute \d+%", caplog.text)
        assert (said is not None) == (again > 0)
        caplog.clear()
        assert before is None or again < before
        before = again
        assert run.held_at_most() <= cap
    assert before == 0, "everything fits: everything is kept"


def test_what_compute_hides_moves_and_of_the_rest_some_is_made_again(on_drive: dict[str, Any]) -> None:
    """A little moves beside compute. More takes longer than blocks that run again: then these do."""
    kept, moved = least({**WORDS, "activations": "keep"}), least({**on_drive, "activations": "nvme"})
    expected = keep_all()
    for cap, again in ((kept - 4 * VALUE, False), (moved + 2 * VALUE, True)):
        run = Run({**on_drive, "device_memory": cap})
        run.step()
        assert same(run, expected)
        assert (run.decided["recompute"] > 0) == again
        assert again or run.decided["nvme"] > 0
        assert run.decided["keep"] > 0
        assert run.held_at_most() <= cap


def test_some_blocks_run_again_and_some_values_move(on_drive: dict[str, Any], tmp_path: Path) -> None:
    """Beside a drive that moves a part of what has to leave in the time of compute."""
    options = {**on_drive, "machine": str(machine(tmp_path / "machine.json", drive=4e9))}
    cap = least({**on_drive, "activations": "nvme"}) + 15 * VALUE
    run = Run({**options, "device_memory": cap})
    run.step()
    assert same(run, keep_all())
    assert min(run.decided.values()) > 0
    assert run.held_at_most() <= cap


def test_the_rates_of_the_machine_decide(on_drive: dict[str, Any], tmp_path: Path) -> None:
    """What leaves moves to a drive that is fast, and runs again where it is slow."""
    cap = least({**WORDS, "activations": "keep"}) - 4 * VALUE
    expected = keep_all()
    for rate, ways in ((1e12, ("nvme", "recompute")), (1e6, ("recompute", "nvme"))):
        run = Run({**on_drive, "device_memory": cap, "machine": str(machine(tmp_path / "machine.json", drive=rate))})
        run.step()
        taken, other = (run.decided[way] for way in ways)
        assert taken > 0 == other
        assert same(run, expected)
    with pytest.raises(PlanError, match="machine 'nowhere' is no shipped profile"):
        Run({"machine": "nowhere"}).step()


def test_blocks_that_take_long_are_not_run_again(on_drive: dict[str, Any]) -> None:
    """With as little memory as moving needs, while their products hide what moves."""
    run = Run({**on_drive, "device_memory": least({**on_drive, "activations": "nvme"}, heavy=True)}, heavy=True)
    run.step()
    assert run.decided["nvme"] > 0 == run.decided["recompute"]


@pytest.mark.slow
def test_with_less_than_moving_all_needs(on_drive: dict[str, Any]) -> None:
    """Then blocks run again, even if their products take long."""
    smallest, moved = least(on_drive, heavy=True), least({**on_drive, "activations": "nvme"}, heavy=True)
    assert smallest < moved
    expected = keep_all(heavy=True)
    for cap in (smallest, (smallest + moved) // 2):
        run = Run({**on_drive, "device_memory": cap}, heavy=True)
        run.step()
        assert same(run, expected)
        assert run.decided["recompute"] > 0
        assert run.held_at_most() <= cap


@pytest.mark.slow
def test_together_with_homes(tmp_path: Path) -> None:
    """Parameters on the drive are read once more for what runs again."""
    drive = {"nvme": str(tmp_path), "bucket": 70_000, "compute_shape": {"piece_numel": 8192}}
    smallest, kept = least(drive), least({**drive, "activations": "keep"})
    assert smallest < kept // 2
    expected = Run({"compute_shape": {"piece_numel": 8192}})
    expected.step()
    for cap in (smallest, smallest + 4 * VALUE):
        run = Run({**drive, "device_memory": cap})
        run.step()
        assert same(run, expected)
        assert run.decided["recompute"] > 0
        assert zinf_compile.stats(run.model)["memory"]["device"]["peak"]["all"] <= cap
    with pytest.raises(BudgetError, match=f"works is {smallest:,}"):
        Run({**drive, "device_memory": smallest - 1}).step()


def test_dynamic_sizes() -> None:
    """Nothing is reserved for what runs again: it may be of any size."""
    cap = (least({**WORDS, "activations": "keep"}) + least(WORDS)) // 2
    losses = []
    for options in ({}, {**WORDS, "device_memory": cap}):
        run = Run(options)
        for rows in (ROWS // 4, ROWS, ROWS // 2):
            torch.manual_seed(1)
            loss = run.model(torch.ones(rows, WIDTH))
            loss.backward()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert run.decided["recompute"] > 0


def test_what_runs_again_without_being_read_is_counted_and_goes() -> None:
    """A block returns all that the forward's did: of values that are kept, the second ones are there until the region ends."""
    forced = {**WORDS, "activations": "recompute"}
    cap = least(forced, heavy=True)
    run = Run({**forced, "device_memory": cap}, heavy=True)
    run.step()
    assert 0.9 * cap < run.held_at_most() <= cap


def test_views_that_autograd_saves_last_hold_nothing_longer(tmp_path: Path) -> None:
    """Views that it takes when all is computed don't count as a last use: what they are views of goes, or leaves, before."""
    kept = least({**WORDS, "activations": "keep"}, heavy=True)
    assert least({**WORDS, "activations": "recompute"}, heavy=True) < kept // 2
    assert least({**WORDS, "activations": "nvme", "nvme": str(tmp_path)}, heavy=True) < kept // 2
