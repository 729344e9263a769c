"""Ctrl-C while the main thread waits: training goes on as if nothing had happened, or an error says what to load first."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import interrupted_after, interrupting, store_of
from tier_twins import Trained, check_same, compare, twins
from tiers import MICRO_BATCHES, context_of, train_step, words
from torch import nn

import zinf_compile
from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.lanes.lanes import MOST_UNDER_WAY, Job, ThreadLane
from zinf_compile.runtime.storage.block_io import BlockIO, Piece
from zinf_compile.runtime.storage.engine import Request
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer
from zinf_compile.runtime.units.pending_updates import Updates

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

WAITS: dict[str, tuple[Any, str]] = {
    "drive": (Request, "wait"),
    "lane": (Job, "wait"),
    "update": (Updates, "_wait_for"),
}
"""Where the main thread may stand still."""


def delay(model: nn.Module, seconds: float = 1.0) -> threading.Event:
    """Let what is left of the last step, if that has not begun, or of the next, wait; return what ends the wait."""
    event = threading.Event()
    context_of(model).lanes.update.submit(lambda: event.wait(seconds))
    return event


def clip(model: nn.Module) -> None:
    """Clip by norms that nobody has asked for before: gradients are read for them."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0)


PHASES: dict[str, tuple[str, Callable[[Trained], Any]]] = {
    "forward": ("drive", lambda trained: trained[0](words(9, 0))),
    "norm": ("drive", lambda trained: clip(trained[0])),
    "state": ("drive", lambda trained: trained[1].state_dict()),
    "synchronize": ("lane", lambda _: zinf_compile.synchronize()),
    "whole": ("drive", lambda trained: zinf_compile.full_state_dict(trained[0])),
}


ONCE = ("forward", "synchronize")
"""Phases that wait once: all that a forward of this model reads is one request."""


@pytest.mark.parametrize(("phase", "number"), [(phase, n) for phase in PHASES for n in (0, 3) if n < 3 or phase not in ONCE])
def test_where_nothing_changes_nothing_happened(phase: str, number: int, drive: Path) -> None:
    """The same call, once more, and training goes on; gradients that were there before stay."""
    ours, optimizer, eager, other = trained = twins(drive)
    wait, act = PHASES[phase]
    if phase == "norm":
        for model in (ours, eager):
            (model(words(2, 0)) / MICRO_BATCHES).backward()
    if phase in ("forward", "whole"):
        # a read that begins by waiting for a write waits, when that is interrupted, for those begun before it
        zinf_compile.synchronize()
        store_of("parameter", ours, optimizer)
    with interrupting(*WAITS[wait], number) as began, pytest.raises(KeyboardInterrupt):
        act(trained)
    assert len(began) == number + 1
    act(trained)
    if phase == "norm":
        clip(eager)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    check_same(trained, step=3, steps=2)


def sweep(trained: Trained, wait: str, every: int) -> int:
    """Interrupt every so-manieth wait of two steps, one at a time, and go on as is said; return how many there were.

    Where a step ended in its middle, the next one must say so; both steps are then done again from a checkpoint.
    """
    ours, optimizer, eager, other = trained
    for number in range(0, 1000, every):
        first = 2 * number
        before, expected = [], []
        for step in (first, first + 1):
            before.append(copy.deepcopy((eager.state_dict(), other.state_dict())))
            expected.append(train_step(eager, other, step))
        done = 0
        with interrupting(*WAITS[wait], number) as began:
            while done < 2:
                try:
                    assert train_step(ours, optimizer, first + done) == expected[done], f"wait {number}"
                    done += 1
                    if done == 2:
                        compare(trained)
                except KeyboardInterrupt:
                    optimizer.zero_grad()
                    if done == 2:
                        compare(trained)
                except StepFailedError as failed:
                    if "Load a checkpoint of model and optimizer" not in str(failed):
                        raise
                    zinf_compile.load_full_state_dict(ours, before[0][0])
                    optimizer.load_state_dict(copy.deepcopy(before[0][1]))
                    optimizer.zero_grad()
                    done = 0
        if len(began) <= number:
            return number // every
    raise AssertionError("two steps are over by then")


@pytest.mark.tiers
@pytest.mark.parametrize("device", [None, SimulatedDevice], ids=["host", "device"])
@pytest.mark.parametrize("wait", WAITS)
def test_any_wait_may_be_interrupted(wait: str, device: type[SimulatedDevice] | None, tmp_path: Path) -> None:
    with simulating(device()) if device else contextlib.nullcontext():
        assert sweep(twins(tmp_path), wait, 1) > 3


class Slow:
    """A transfer that Ctrl-C meets while it is waited for the first time."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt


def test_what_was_waited_for_in_vain_is_waited_for_again() -> None:
    """Before its room is used: it may still be written to. The last one is waited for first."""
    slot, transfers = ChunkBuffer(None, None), [Slow(), Slow()]
    slot.under_way, slot.chunk = list(transfers), 3
    for number in range(3):
        with pytest.raises(KeyboardInterrupt) if number < 2 else contextlib.nullcontext():
            slot.drain()
    assert [transfer.waits for transfer in transfers] == [2, 3]
    assert slot.chunk == 3


@pytest.mark.parametrize("number", [0, 2])
def test_a_step_that_could_not_begin_its_late_part_is_torn(number: int, drive: Path) -> None:
    """Nobody waits for what nobody will update; what was updated before is not all."""
    ours, optimizer, eager, other = trained = twins(drive)
    saved = copy.deepcopy((eager.state_dict(), other.state_dict()))
    for micro in range(MICRO_BATCHES):
        (ours(words(2, micro)) / MICRO_BATCHES).backward()
    zinf_compile.synchronize()
    with interrupting(*((Updates, "updated") if not number else (ThreadLane, "submit")), 0), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for _ in range(2):  # whoever reads is told, not only the first one
        with pytest.raises(StepFailedError, match=r"ended in the middle.*Load a checkpoint"):
            ours(words(3, 0))
    with pytest.raises(StepFailedError, match="ended in the middle"):
        zinf_compile.full_state_dict(ours)
    zinf_compile.load_full_state_dict(ours, saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    check_same(trained, step=2, steps=2)


def test_a_wait_for_the_last_update_ends_at_once(drive: Path) -> None:
    """In a forward, which needs it, and in `synchronize`; the update itself goes on."""
    trained = twins(drive)
    ours, optimizer, eager, other = trained
    for act in (lambda: ours(words(3, 0)), zinf_compile.synchronize, optimizer.state_dict):
        event = delay(ours, 30)
        assert train_step(ours, optimizer, 2) == train_step(eager, other, 2)
        start = time.perf_counter()
        with interrupted_after(0.1), pytest.raises(KeyboardInterrupt):
            act()
        assert time.perf_counter() - start < 10
        event.set()
    check_same(trained, step=3, steps=2)


@pytest.mark.parametrize("phase", ["room", "lane"])
def test_a_backward_that_waits_for_room_for_gradients(phase: str, drive: Path) -> None:
    """On their way to the drive, of which a full lane or a limit in bytes holds them up."""
    trained = twins(drive)
    ours, optimizer = trained[:2]
    context = context_of(ours)
    zinf_compile.synchronize()
    event = threading.Event()
    for _ in range(1 if phase == "room" else MOST_UNDER_WAY):
        context.lanes.swap.submit(lambda: event.wait(30))
    limit, context.memory.inflight_gradients.limit = context.memory.inflight_gradients.limit, 1 if phase == "room" else None
    loss = ours(words(2, 0))
    start = time.perf_counter()
    with interrupted_after(0.1), pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert time.perf_counter() - start < 10
    event.set()
    context.memory.inflight_gradients.limit = limit
    optimizer.zero_grad()
    check_same(trained, step=2, steps=2)
    let_swaps_end(ours)
    assert context.memory.inflight_gradients._held == 0


def let_swaps_end(model: nn.Module) -> None:
    """Return when no gradient is on its way."""
    context_of(model).lanes.swap.submit(lambda: None).wait()


def test_a_block_interrupted_as_it_was_registered_is_free_again(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = twins(drive)
    really = BlockIO.admit

    def admit(io: BlockIO, piece: Piece) -> bool:
        really(io, piece)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return True

    zinf_compile.synchronize()
    monkeypatch.setattr(BlockIO, "admit", admit)
    with pytest.raises(KeyboardInterrupt):
        trained[0](words(2, 0))
    monkeypatch.setattr(BlockIO, "admit", really)
    check_same(trained, step=2, steps=2)
