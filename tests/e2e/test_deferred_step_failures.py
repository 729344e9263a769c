"""Steps that fail during the next forward, or whose process is forked or ends meanwhile: who needs them is told."""

from __future__ import annotations

import copy
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_steps import Compile, both, check, deferring, delay
from marks import more
from models import TiedWords, tokens
from paths import SUPPORT
from programs import run_program
from tiers import context_of, let_steps_end
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.errors import StepFailedError
from zinf_compile.optim.record import OptimizerRecord, State

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.fixture(scope="module", params=["drive", "memory apart", "host apart", more("drive apart")])
def on_drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return what compiles a model so that its steps are deferred."""
    with deferring(request.param, tmp_path_factory.mktemp("drive")) as compile_it:
        yield compile_it


def break_step(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = let_steps_end) -> None:
    """Take a step that fails after its first chunk, beside whatever comes next."""

    mark_incomplete = OptimizerRecord.mark_incomplete

    def fail(record: OptimizerRecord, *arguments: Any) -> None:
        if record.state is State.DEFERRED:
            raise OSError("no such drive")
        mark_incomplete(record, *arguments)

    zinf_compile.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerRecord, "mark_incomplete", fail)
        optimizer.step()
        meanwhile()
        let_steps_end()


@pytest.mark.parametrize("told", ["forward", "step", "save", "states", "synchronize"])
def test_a_step_that_fails_later_tells_who_needs_it(told: str, on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = both(on_drive, steps=3)
    (eager, first), (ours, second) = sides
    break_step(second, monkeypatch)
    asks: dict[str, Callable[[], Any]] = {
        "forward": lambda: ours(*tokens(3)),
        "step": second.step,
        "save": lambda: zinf_compile.full_state_dict(ours),
        "states": second.state_dict,
        "synchronize": zinf_compile.synchronize,
    }
    middle = "ended in the middle, at chunk 1: some parameters and states are updated.*Load a checkpoint"
    with pytest.raises(StepFailedError, match=f"{middle}.*Cause: no such drive"):
        asks[told]()
    with pytest.raises(StepFailedError, match=middle):
        second.step()
    zinf_compile.load_full_state_dict(ours, eager.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    check(sides)


def test_who_replaces_everything_need_not_be_told(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = both(on_drive, steps=3)
    (eager, first), (ours, second) = sides
    break_step(second, monkeypatch)
    zinf_compile.load_full_state_dict(ours, eager.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    check(sides)


def test_values_loaded_while_the_step_fails_are_whole(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading waits for the step, which fails then: what was loaded is not marked incomplete by that."""
    sides = both(on_drive, steps=3)
    (eager, first), (ours, second) = sides
    zinf_compile.synchronize()
    begin = threading.Event()
    context_of(ours).lanes.update.submit(lambda: begin.wait(60))

    def load() -> None:
        threading.Timer(0.5, begin.set).start()
        zinf_compile.load_full_state_dict(ours, eager.state_dict())

    break_step(second, monkeypatch, load)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    check(sides)


def test_who_replaces_the_states_alone_is_told_by_the_next_read(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = both(on_drive, steps=3)
    (_, first), (ours, second) = sides
    break_step(second, monkeypatch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.raises(StepFailedError, match="ended in the middle"):
        ours(*tokens(3))


def test_a_forked_child_is_told(on_drive: Compile) -> None:
    sides = both(on_drive)
    zinf_compile.synchronize()
    delay(sides[1][0])
    for _, optimizer in sides:
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from Python 3.12 on
        child = os.fork()
    if not child:
        try:
            sides[1][1].state_dict()
        except StepFailedError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(sides)


def test_a_handler_at_exit_may_save_what_a_step_left(tmp_path: Path) -> None:
    program = f"""
import atexit, sys
sys.path[:0] = {[str(SUPPORT), str(Path(__file__).parent)]!r}
import torch, zinf_compile
model = None
atexit.register(lambda: print(sum(t.numel() for t in zinf_compile.full_state_dict(model).values())))
from deferred_steps import TiedWords, adamw, compiled, delay, options_for, plain_step, tokens
model = compiled(TiedWords(), options_for(("nvme",) * 3, {str(tmp_path)!r}, piece=128))
optimizer = adamw(model.parameters())
for number in range(3):
    zinf_compile.synchronize()
    if number == 2:
        delay(model)
    plain_step(model, optimizer, tokens(number))
"""
    run = run_program(program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(sum(value.numel() for value in TiedWords().state_dict().values()))
    assert "Error" not in run.stderr


def test_a_failure_that_nobody_asks_for_keeps_nothing_alive(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = both(on_drive, steps=3)
    break_step(sides[1][1], monkeypatch)
    gone = [weakref.ref(sides[1][1]), weakref.ref(next(sides[1][0].parameters()))]
    sides.clear()
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
