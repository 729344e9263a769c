"""Training on several ranks where full parameters stay on the device until the step, as cases of `run_ranks`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from named_cap import named_cap
from rank_gradients_at_step import Broken
from rank_kept_units import WIDTH, Deep, Many, Plain, Run, Tied, least_cap_of, train_alike
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.errors import BudgetError

STAY = {"reshard_after_backward": False}
MODELS = {"plain": Plain, "tied": Tied, "broken": Broken}


def train(rank: int, size: int, options: dict[str, Any], model: str, half: bool) -> list[int]:
    """Train where parameters are let go of and where they stay: the same bits. Returns what the last step of each received."""
    return train_alike(rank, [options, {**options, **STAY}], MODELS[model], half=half)


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
    assert all(context.full_copies.holds(unit) for unit in frozen)
    assert context.full_copies.bytes == sum(4 * unit.numel for unit in frozen)


def handed_out(rank: int, size: int) -> None:
    """A shard that one rank hands out may change there unseen: all ranks gather its graph's parameters for each use again."""
    found = []
    for more in ({}, STAY):
        run = Run(rank, more, Plain)
        run.call(run.batch()).backward()
        shard = run.model.layers[2].weight.detach().local() if rank == 1 else None
        for scale in (0.5, 0.25):
            if shard is not None:
                shard.mul_(scale)
            run.losses.append(run.call(run.batch()).item())
        found.append(run.losses)
    assert found[0] == found[1]


def loads(rank: int, size: int, folder: str) -> None:
    """What a checkpoint brings back, of either kind, is what the next call computes with."""
    for number, (save, load) in enumerate(((zinf_compile.save, zinf_compile.load), (_save_dcp, _load_dcp))):
        run = Run(rank, STAY, Small)
        run.step()
        batch = run.batch()
        expected = run.call(batch).item()
        save(f"{folder}/{number}", run.model, run.optimizer)
        for _ in range(3):
            run.step()
        assert run.call(batch).item() != expected
        load(f"{folder}/{number}", run.model, run.optimizer)
        assert run.call(batch).item() == expected


class Small(Plain):
    """With biases of which three ranks have two elements, two and none."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x).square().mean()


def _save_dcp(folder: str, model: nn.Module, optimizer: Any) -> None:
    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)


def _load_dcp(folder: str, model: nn.Module, optimizer: Any) -> None:
    dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)


def another_model_is_gone(rank: int, size: int) -> None:
    """A model that only one rank's garbage collector has let go of is none of another model's business."""
    first = Run(rank, STAY, Plain)
    first.call(first.batch()).backward()
    torch.compiler.reset()
    model = Plain()
    call: Any = torch.compile(model, backend=BACKEND, options={"compute": "fx", "bucket": "4KiB", **STAY})
    call(first.batch()).backward()
    if rank == 1:
        units = [parameter._zinf_unit for parameter in first.model.parameters()]
        for unit in units:
            unit.context.full_copies.drop(unit)
    call(first.batch()).backward()


def states_within_cap(rank: int, size: int) -> tuple[int, int]:
    """An optimizer with more states than were planned for is refused by a cap that holds, with what stays."""
    least = []
    for more in ({}, STAY):
        options = {"tile": "1MiB", **more}
        caps = [least_cap_of(rank, options, Deep)]
        for number in range(1, 5):
            run = Run(rank, {**options, "device_memory": caps[-1]}, Deep)
            run.optimizer = Many(run.model.parameters())
            try:
                for _ in range(3):
                    run.call(run.batch()).backward()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
            except BudgetError as error:
                most = torch.tensor(named_cap(error))
                dist.all_reduce(most, dist.ReduceOp.MAX)  # a rank may still hold what is on its way
                caps.append(int(most))
            if len(caps) == number:  # it trained
                break
        assert 1 < len(caps) < 5
        assert zinf_compile.stats(run.model)["memory"]["device"]["peak"]["all"] <= caps[-1]
        least.append(caps[-1])
    return least[0], least[1]


def least_cap(rank: int, size: int) -> tuple[int, int]:
    """Return the least caps that are named where nothing stays and where all does, which both train."""
    least = []
    for more in ({}, STAY):
        options = {"tile": "1MiB", **more}
        least.append(least_cap_of(rank, options, Plain))
        run = Run(rank, {**options, "device_memory": least[-1]}, Plain)
        for _ in range(3):
            run.step()
        assert zinf_compile.stats(run.model)["memory"]["device"]["peak"]["all"] <= least[-1]
    return least[0], least[1]
