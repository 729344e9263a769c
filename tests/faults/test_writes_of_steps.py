"""Deferred steps whose drive refuses a write: who reads what it should have written gets the step's own error."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deferred_steps import Compile, both, check, deferring
from faults import failing
from held_updates import held_updates
from models import tokens
from tiers import context_of, let_steps_end
from torch import nn
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.errors import StepFailedError

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.fixture(scope="module", params=["drive", "drive apart"])
def on_drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return what compiles a model so that its steps are deferred."""
    with deferring(request.param, tmp_path_factory.mktemp("drive")) as compile_it:
        yield compile_it


VALUES = 3
"""The number of the write that keeps the second chunk's values."""


def words(model: nn.Module) -> torch.Tensor:
    return next(iter(model.parameters()))


READS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "forward": lambda model, _: model(*tokens(3)),
    "eager code": lambda model, _: words(model).sum(),
    "whole": lambda model, _: words(model).detach().clone(),
    "state dict": lambda model, _: zinf_compile.full_state_dict(model),
}


@pytest.mark.parametrize("read", READS)
def test_a_reader_is_told_why_the_step_failed(read: str, on_drive: Compile) -> None:
    """The read comes before the step knows that the drive refused a write: the thread that updates stands still meanwhile."""
    sides = both(on_drive, steps=3)
    (eager, first), (ours, second) = sides
    saved = copy.deepcopy((eager.state_dict(), first.state_dict()))
    zinf_compile.synchronize()
    engine = context_of(ours).engine
    with held_updates(1) as gate, failing(engine, "write", VALUES) as began:
        second.step()
        while len(began) <= VALUES:
            time.sleep(0.01)
        threading.Timer(0.5, gate.set).start()
        with pytest.raises(StepFailedError, match=r"ended in the middle.*Load a checkpoint.*Cause.*cannot write bytes"):
            READS[read](ours, second)
    let_steps_end()
    for _ in range(2):  # and it is refused until all is loaded
        with pytest.raises(StepFailedError, match="ended in the middle"):
            second.state_dict()
        with pytest.raises(StepFailedError, match="ended in the middle"):
            ours(*tokens(3))
    zinf_compile.load_full_state_dict(ours, saved[0])
    second.load_state_dict(saved[1])
    check(sides)
