"""Drives that fail, fill up or lie, and interrupts, with everything on a drive: an error that says what, never a wrong number."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, flip, named, offloaded_of, store_of
from marks import more
from tier_twins import PIECE, Trained, check_same, compare, twins
from tiers import MICRO_BATCHES, Placement, compiled, context_of, options_for, sundry, train_step, words
from torch import nn
from training import adamw, assert_same_models

import zinf_compile
from zinf_compile.errors import StepFailedError, StoreError, ZinfError
from zinf_compile.optim import offloaded_states
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.storage import scratch_file
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step update all there is to update before it returns."""
    monkeypatch.setattr(offloaded_states, "may_defer", lambda *_, **__: False)


at_once = pytest.mark.usefixtures("_at_once")


def backward(model: nn.Module, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        (model(words(step, micro)) / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def load(trained: Trained) -> None:
    """Load the eager twin's state."""
    ours, optimizer, eager, other = trained
    zinf_compile.load_full_state_dict(ours, eager.state_dict())
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    optimizer.zero_grad()


@at_once
def test_an_interrupt_before_the_first_update_leaves_no_half_read_chunk(drive: Path) -> None:
    """The step's first reads are those of two chunks."""
    ours, optimizer, eager, other = trained = twins(drive)
    (states,) = offloaded_of(optimizer)
    for number in range(8):
        optimizer.state_dict()  # the last chunks are in memory now
        states._forward = True
        for model in (ours, eager):
            backward(model, number)
        with failing(context_of(ours).engine, "read", number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        states._forward = True
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        check_same(trained, step=number)


@at_once
@pytest.mark.parametrize("moment", ["forward", "backward", "norm", "step"])
def test_a_flipped_bit_before_anything_is_updated(moment: str, drive: Path) -> None:
    """It names what, where and on which drive; once the drive is right again so is the model."""
    ours, optimizer, eager, other = trained = twins(drive)
    loss = ours(words(2, 0))
    if moment in ("norm", "step"):
        loss.backward()
        eager(words(2, 0)).backward()
    elif moment == "backward":
        with torch.no_grad():
            ours(words(2, 0))  # else the forward has left it what it begins with
    name = "gradient of down.weight" if moment == "norm" else "parameter embedding.weight"
    kind = 1.0 if moment == "norm" else 2.0  # for which nobody has asked before: gradients are read
    act: dict[str, Callable[[], Any]] = {
        "forward": lambda: ours(words(2, 0)),
        "backward": loss.backward,
        "norm": lambda: nn.utils.clip_grad_norm_(ours.parameters(), 0.1, norm_type=kind),
        "step": optimizer.step,
    }
    offloaded_of(optimizer)[0]._forward = True  # begins with the embedding
    back = flip(store_of("gradient of" if moment == "norm" else "parameter", ours, optimizer), name)
    with pytest.raises((StoreError, StepFailedError), match=rf"{name}.*offset [\d,]+ of the store's file in") as raised:
        act[moment]()
    said = "nothing is updated yet, parameters and states are as before this step" in str(raised.value)
    assert said == (moment == "step")
    back()
    for model, each in ((ours, optimizer), (eager, other)):
        if moment in ("norm", "step"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind)
            each.step()
        each.zero_grad()
    check_same(trained, step=3)


@at_once
def test_two_blocks_that_cannot_be_read_are_no_lost_update(drive: Path) -> None:
    """The states of the step's first chunks, which are read together."""
    ours, optimizer, eager, other = trained = twins(drive)
    for model in (ours, eager):
        backward(model, 2)
    optimizer.state_dict()  # the last chunks are in memory now
    offloaded_of(optimizer)[0]._forward = True
    store = store_of("exp_avg of", ours, optimizer)
    back = [
        flip(store, f"{state} of embedding.weight (chunk {chunk})") for state in ("exp_avg", "exp_avg_sq") for chunk in (0, 1)
    ]
    for _ in range(2):
        offloaded_of(optimizer)[0]._forward = True
        with pytest.raises(StepFailedError, match=r"nothing is updated yet.*exp_avg(_sq)? of embedding.weight \(chunk 0"):
            optimizer.step()
    for turn in back:
        turn()
    for each in (optimizer, other):
        each.step()
        each.zero_grad()
    check_same(trained, step=3)


@at_once
def test_an_update_that_did_not_reach_the_drive_is_noticed(drive: Path) -> None:
    """Where it was of states, by the next step; until a checkpoint is loaded there is none."""
    ours, optimizer, _, _ = trained = twins(drive)
    backward(ours, 2)
    offloaded_of(optimizer)[0]._forward = True
    with failing(context_of(ours).engine, "write", 25) as began:
        optimizer.step()
    assert len(began) == 27, "nine pieces: values and two states"
    optimizer.zero_grad()
    backward(ours, 3)
    lost = "updated was lost in part while it was written to the drive. Load a checkpoint"
    with pytest.raises(StepFailedError, match=rf"{lost}.*exp_avg of .*offset"):
        optimizer.step()
    with pytest.raises(StepFailedError, match=lost):
        optimizer.step()
    load(trained)
    check_same(trained, step=2)


@at_once
@pytest.mark.parametrize("kind", ["parameter", "gradient of", "exp_avg of"])
def test_a_flipped_bit_in_the_middle_of_a_step(kind: str, drive: Path) -> None:
    ours, optimizer, _, _ = trained = twins(drive)
    (states,) = offloaded_of(optimizer)
    optimizer.state_dict()
    states._forward = True
    backward(ours, 2)
    back = flip(store_of(kind, ours, optimizer), f"{kind} down.weight")
    middle = r"ended in the middle, at chunk \d.*Load a checkpoint"
    with pytest.raises(StepFailedError, match=rf"{middle}.*{kind} down.weight.*offset [\d,]+ of the store's file in"):
        optimizer.step()
    back()
    with pytest.raises(StepFailedError, match=middle):
        optimizer.step()
    load(trained)
    check_same(trained, step=2)


def sweep(trained: Trained, way: str, error: type[BaseException], every: int) -> int:
    """Fail every so-manieth transfer of two steps, one at a time, and go on as the error says; return how many failed.

    What a step read can be tried again; where an update may be lost, both twins go back to before it.
    """
    ours, optimizer, eager, other = trained
    engine = context_of(ours).engine
    for number in range(0, 1000, every):
        first = 2 * number
        before, expected = [], []
        for step in (first, first + 1):
            before.append(copy.deepcopy((eager.state_dict(), other.state_dict())))
            expected.append(train_step(eager, other, step))
        done = 0
        with failing(engine, way, number, error) as began:
            while done < 2:
                try:
                    assert train_step(ours, optimizer, first + done) == expected[done]
                    done += 1
                    if done == 2:
                        compare(trained)
                except (ZinfError, KeyboardInterrupt) as failed:
                    optimizer.zero_grad()
                    if not (
                        isinstance(failed, KeyboardInterrupt) or named(failed) or record_of(optimizer).incomplete is not None
                    ):
                        raise
                    if way == "read" and record_of(optimizer).incomplete is None:
                        continue
                    done = 0
                    zinf_compile.load_full_state_dict(ours, before[0][0])
                    optimizer.load_state_dict(copy.deepcopy(before[0][1]))
        if len(began) <= number:
            return number // every
    raise AssertionError("two steps are over by then")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "error", "device"),
    [
        ("read", OSError, SimulatedDevice),
        ("write", KeyboardInterrupt, None),
        *(
            more(way, error, device)
            for way, error, device in itertools.product(("read", "write"), (OSError, KeyboardInterrupt), (None, SimulatedDevice))
        ),
    ],
)
def test_any_transfer_may_fail(
    way: str, error: type[BaseException], device: type[SimulatedDevice] | None, tmp_path: Path
) -> None:
    with simulating(device()) if device else contextlib.nullcontext():
        failed = sweep(twins(tmp_path), way, error, 3 if way == "read" else 1)
    assert failed > (10 if way == "write" and error is KeyboardInterrupt else 20), "most writes are not the main thread's"


@at_once
@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("placement", [("device", "device", "nvme"), ("host", "host", "nvme"), ("nvme", "device", "device")])
def test_whatever_fails_in_a_step_it_says_what_is_done(placement: Placement, way: str, tmp_path: Path) -> None:
    """Each transfer of a step that ends before it returns: what is intact can be tried again, the rest is loaded."""
    failures: list[StepFailedError] = []
    with simulating(SimulatedDevice()):
        ours, optimizer, eager, other = trained = twins(tmp_path, placement)
        for number in range(100):
            load(trained)
            for model in (ours, eager):
                backward(model, number)
            with failing(context_of(ours).engine, way, number) as began:
                try:
                    optimizer.step()
                except StepFailedError as failed:
                    failures.append(failed)
                    if record_of(optimizer).incomplete is not None:
                        load(trained)
                        backward(ours, number)
                    optimizer.step()
            other.step()
            for each in (other, optimizer):
                each.zero_grad()
            compare(trained)
            if len(began) <= number:
                break
    assert len(failures) == number > 8, "each once"
    assert all(named(failed) and isinstance(failed.__cause__, StoreError) for failed in failures)
    said = re.findall("nothing is updated yet|ended in the middle", "".join(map(str, failures)))
    assert len(said) == number
    assert said.count("nothing is updated yet") == (0 if way == "write" else said.index("ended in the middle"))


def test_an_error_of_another_kind_says_it_too(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, optimizer, eager, other = trained = twins(drive, ("device", "device", "nvme"))
    for model in (ours, eager):
        backward(model, 2)
    for moment, said in (("begin", "nothing is updated yet"), ("finish", "ended in the middle")):
        with monkeypatch.context() as patch:
            patch.setattr(offloaded_states.OffloadedStates, moment, lambda *_: {}["nowhere"])
            with pytest.raises(StepFailedError, match=f"{said}.*Cause: 'nowhere'") as raised:
                optimizer.step()
        assert isinstance(raised.value.__cause__, KeyError)
    load(trained)
    other.zero_grad()
    check_same(trained, step=3)


@pytest.mark.parametrize("number", range(4))
def test_a_full_drive_changes_nothing(number: int, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room: parameters, gradients, the second gradients while they accumulate, the states."""
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(("nvme",) * 3, drive, piece=PIECE))
    answers = iter([0] * number + [errno.ENOSPC])
    really = scratch_file.fallocate
    monkeypatch.setattr(scratch_file, "fallocate", lambda fd, size: next(answers, 0) or really(fd, size))
    optimizer = adamw(ours.parameters())
    descriptors = len(os.listdir("/proc/self/fd"))
    failure: type[Exception] = StoreError if number < 3 else StepFailedError
    with pytest.raises(failure, match=r"cannot reserve space .* bytes needed, .* the disk is full") as raised:
        train_step(ours, optimizer, 0)
    assert ("nothing is updated yet" in str(raised.value)) == (number == 3)
    gc.collect()
    if number < 2:
        assert not any(isinstance(p, ShardedParameter) for p in ours.parameters())
        assert_same_models(eager, ours)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 3, "the engine's own"
    optimizer.zero_grad()
    other = adamw(eager.parameters())
    check_same((ours, optimizer, eager, other), step=0)


def test_no_room_for_a_second_gradient_leaves_the_first(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may then be taken with what there is."""
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(("nvme",) * 3, drive, piece=PIECE))
    (optimizer, other) = (adamw(model.parameters()) for model in (ours, eager))
    for model in (ours, eager):
        model(words(0, 0)).backward()
    loss = ours(words(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(scratch_file, "fallocate", lambda fd, size: errno.ENOSPC)
        with pytest.raises(StoreError, match="the disk is full"):
            loss.backward()
    for each in (optimizer, other):
        each.step()
        each.zero_grad()
    check_same((ours, optimizer, eager, other), step=1)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_a_drive_that_fails_while_parameters_move_there_changes_nothing(number: int, drive: Path) -> None:
    """No parameter is hollow before all are kept."""
    first = compiled(sundry(), options_for(("nvme",) * 3, drive, piece=PIECE))
    first(words(0, 0))  # there is an engine now
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(("nvme",) * 3, drive, piece=PIECE))
    with failing(context_of(first).engine, "write", number), pytest.raises(StoreError, match=r"cannot write .*'parameter "):
        ours(words(0, 0))
    assert not any(isinstance(p, ShardedParameter) for p in ours.parameters())
    assert_same_models(eager, ours)
    optimizer, other = (adamw(model.parameters()) for model in (ours, eager))
    check_same((ours, optimizer, eager, other), step=0)


def test_an_exception_between_forward_and_backward(drive: Path) -> None:
    ours, _, _, _ = trained = twins(drive)
    for step in range(2, 5):
        loss = ours(words(step, 0))
        with pytest.raises(KeyError):
            {}[loss]
        del loss
        check_same(trained, step=step)
