"""A model with states on drives beside its eager twin, trained alike: what faults and interrupts must not tell apart."""

from __future__ import annotations

from pathlib import Path

from optimizers import assert_same_states
from tiers import Placement, Sundry, compiled, options_for, sundry, train_step
from torch import nn
from torch.optim import Optimizer
from training import adamw, assert_same

import zinf_compile

PIECE = 96
"""Elements of a piece of a shard."""

Trained = tuple[Sundry, Optimizer, nn.Module, Optimizer]
"""A model, by default with everything on a drive, and its eager twin; each with its optimizer, after two steps."""


def twins(folder: Path, placement: Placement = ("nvme",) * 3) -> Trained:
    """Return both."""
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(placement, folder, piece=PIECE))
    theirs, other = (adamw(model.parameters()) for model in (ours, eager))
    for step in range(2):
        assert train_step(ours, theirs, step) == train_step(eager, other, step)
    return ours, theirs, eager, other


def compare(trained: Trained) -> None:
    """Compare the twins, whole."""
    ours, optimizer, eager, other = trained
    whole = zinf_compile.full_state_dict(ours)
    for name, value in eager.state_dict().items():
        assert_same(name, value, whole[name])
    assert_same_states(other, optimizer)


def check_same(trained: Trained, *, step: int, steps: int = 1) -> None:
    """Take `steps` steps from that one on with both, then compare them."""
    ours, optimizer, eager, other = trained
    for number in range(step, step + steps):
        assert train_step(ours, optimizer, number) == train_step(eager, other, number)
    compare(trained)
