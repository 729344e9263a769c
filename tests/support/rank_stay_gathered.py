"""Training on several ranks where full parameters stay on the device until the step, as cases of `run_ranks`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from named_cap import named_cap
from rank_gradients_at_step import Broken
from rank_kept_units import Plain, Run, Tied, same_state

import zinf_compile
from zinf_compile.errors import BudgetError, RankMismatchError

STAY = {"reshard_after_backward": False}
MODELS = {"plain": Plain, "tied": Tied, "broken": Broken}


def train(rank: int, size: int, options: dict[str, Any], model: str, half: bool) -> list[int]:
    """Train where parameters are let go of and where they stay: the same bits. Returns what the last step received."""
    found, received = [], []
    for more in ({}, STAY):
        run = Run(rank, {**options, **more}, MODELS[model])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            for each in ({}, {"in_flight": True}, {"between": True}, {}):
                run.step(**each)
        found.append((run.losses, zinf_compile.full_state_dict(run.model)))
        received.append(run.received)
    (losses, state), (staying_losses, staying_state) = found
    assert losses == staying_losses
    assert same_state(state, staying_state)
    return received


def sent_and_received(rank: int, size: int, options: dict[str, Any], backwards: int) -> tuple[int, int, int]:
    """Return what a step sends and receives, and the bytes of full parameters that are there before it."""
    run = Run(rank, options, Plain)
    for _ in range(2):
        for _ in range(backwards):
            run.call(run.batch().requires_grad_()).backward()  # or the backward doesn't read the first parameter
        held = zinf_compile.stats(run.model)["memory"]["device"]["now"]["gathered"]
        run.optimizer.step()
        run.optimizer.zero_grad()
    links = zinf_compile.stats(run.model)["links"]
    return links["to ranks"]["bytes_last_step"], links["from ranks"]["bytes_last_step"], held


def changes_between(rank: int, size: int) -> None:
    """What a script changes between two micro-batches is what the next one computes with."""
    found = []
    for more in ({}, STAY):
        run = Run(rank, more, Plain)
        weights = [layer.weight for layer in run.model.layers]
        run.call(run.batch()).backward()
        with torch.no_grad():
            weights[0].mul_(0.5)
        run.losses.append(run.call(run.batch()).item())
        with zinf_compile.gathered(run.model, write=True), torch.no_grad():
            weights[1].copy_(torch.eye(len(weights[1])))
        run.losses.append(run.call(run.batch()).item())
        loaded = {name: torch.full(parameter.shape, 0.01) for name, parameter in run.model.named_parameters()}
        zinf_compile.load_full_state_dict(run.model, loaded)
        run.call(run.batch()).backward()
        run.losses.append(run.call(run.batch()).item())
        run.optimizer.step()
        run.losses.append(run.call(run.batch()).item())
        found.append(run.losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == 4, "each change counts"


class Twice(torch.optim.SGD):
    """Takes two steps in each, of gradients that a closure computes anew."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


def closures(rank: int, size: int) -> None:
    """A step that calls its closure several times, and changes parameters between the calls."""
    found = []
    for more in ({}, STAY):
        run = Run(rank, more, Plain)
        run.optimizer = Twice(run.model.parameters(), lr=0.5)
        batch = run.batch()

        def closure(run: Run = run, batch: torch.Tensor = batch) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.call(batch)
            loss.backward()
            run.losses.append(loss.item())
            return loss

        run.call(batch).backward()
        for _ in range(3):
            run.optimizer.step(closure)
        found.append(run.losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) == 6


def frozen_stay(rank: int, size: int) -> None:
    """A step lets go of what it changes; what nothing changes stays, and comes once in all."""
    run = Run(rank, STAY, Tied)
    for _ in range(2):
        run.step()
    frozen = {parameter._zinf_unit for name, parameter in run.model.named_parameters() if name.startswith("frozen")}
    (context,) = {unit.context for unit in frozen}
    assert set(context.full_copies.serials()) == {unit.serial for unit in frozen}
    assert context.full_copies.bytes == sum(4 * unit.numel for unit in frozen)


def one_rank_has_none(rank: int, size: int) -> str:
    """Ranks that would gather different units raise before they begin."""
    run = Run(rank, STAY, Plain)
    run.call(run.batch()).backward()
    if rank == 1:
        unit = run.model.layers[2].weight._zinf_unit
        unit.context.full_copies.drop(unit)
    with pytest.raises(RankMismatchError) as raised:
        run.call(run.batch())
    return str(raised.value)


def least_cap(rank: int, size: int) -> tuple[int, int]:
    """Return the least caps that are named where nothing stays and where all does, which both train."""
    least = []
    for more in ({}, STAY):
        options = {"tile": "1MiB", **more}
        with pytest.raises(BudgetError) as refused:
            Run(rank, {**options, "device_memory": 1}, Plain).step()
        least.append(named_cap(refused.value))
        run = Run(rank, {**options, "device_memory": least[-1]}, Plain)
        for _ in range(3):
            run.step()
        assert zinf_compile.stats(run.model)["memory"]["device"]["peak"]["all"] <= least[-1]
    return least[0], least[1]
