"""`optimizer.state` between steps: whatever a script reads, changes, takes out or replaces there has eager's effect."""

from __future__ import annotations

import collections
import copy
import gc
import io
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import assert_same_states
from state_acts import another_mapping, clear, clear_one, delete_momentum, pop, read, restart_momentum, same, through_an_alias
from state_pairs import ALL_ON_NVME, Pair, sgd
from tiers import Placement, compiled, context_of, options_for, sundry, train_step
from torch import nn
from torch.optim import Optimizer
from training import adamw

import zinf_compile
from zinf_compile.errors import BudgetError, StepFailedError, UnsupportedOptimizerError
from zinf_compile.optim.record import record_of
from zinf_compile.sharded import host_shortage

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


class Counting(torch.optim.SGD):
    """Its groups count steps, as schedule-free optimizers' do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def two_groups(parameters: Any) -> Optimizer:
    first, *rest = [p for p in parameters if p.requires_grad]
    return Counting([{"params": [first], "k": 0}, {"params": rest, "k": 0}], lr=0.05, momentum=0.9)


@pytest.mark.parametrize("placement", [ALL_ON_NVME, ("device", "device", "nvme")], ids="-".join)
def test_steps_with_no_gradients_or_with_those_of_some_groups(placement: Placement, drive: Path) -> None:
    pair = Pair(placement, drive, two_groups)
    seconds = [adamw([model.frozen.weight, *model.up.parameters()]) for model in (pair.eager, pair.ours)]
    for _ in range(3):
        for (_, optimizer), second in zip(pair.sides, seconds, strict=True):
            optimizer.step()  # there are none
            second.step()
        pair.train()
        pair.compare()
        for model, optimizer in pair.sides:
            train_without_steps(model)
            next(iter(model.parameters())).grad = None
            optimizer.step()
            optimizer.zero_grad()
        for (model, _), second in zip(pair.sides, seconds, strict=True):
            train_without_steps(model)
            second.step()
            second.step()
            model.zero_grad()
            second.step()
        pair.compare()
    assert_same_states(*seconds)


def train_without_steps(model: nn.Module) -> None:
    """Leave gradients."""
    train_step(model, torch.optim.SGD([torch.zeros(1)]), 50)


@pytest.mark.parametrize("placement", [ALL_ON_NVME, pytest.param(("device", "device", "nvme"), marks=pytest.mark.thorough)])
def test_a_state_that_is_held_is_the_state(placement: Placement, drive: Path) -> None:
    """As in eager: it sees what steps do, and steps see what is done to it, until it is reset."""
    pair = Pair(placement, drive, sgd)
    pair.train(2)
    held = pair.act(lambda optimizer, parameters: [optimizer.state[p]["momentum_buffer"] for p in parameters[:3]])
    entries = pair.act(lambda optimizer, parameters: optimizer.state[parameters[1]])
    for _ in range(2):
        pair.train()
        same(*held)
        for one in (*held[0], *held[1]):
            one.mul_(0.5)
        pair.train()
        same(*held)
        pair.compare()
        same(dict(entries[0]), dict(entries[1]))
    again = pair.optimizer.state[pair.ours.embedding.weight]["momentum_buffer"]
    assert any(again is one for one in held[1]), "there is one tensor of a state"
    pair.act(clear)
    pair.train(2)
    same(*held)
    for one in held[1]:
        one.zero_()
    pair.train()
    pair.compare()


def test_what_a_step_leaves_to_the_next_forward_is_waited_for_or_reset(drive: Path) -> None:
    pair = Pair(ALL_ON_NVME, drive, sgd)
    pair.train(2)
    for act in (clear, pop, clear_one, restart_momentum, delete_momentum, another_mapping, read, through_an_alias):
        for _ in range(2):
            pair.train()
            context_of(pair.ours).lanes.update.submit(lambda: time.sleep(0.02))
            pair.train()
            assert record_of(pair.optimizer).deferred is not None or act is another_mapping
            same(*pair.act(act))
    pair.train(2)
    pair.compare()


class Numbers(torch.optim.SGD):
    """Keeps nothing but a number for each parameter, on which its update depends."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                    p.add_(p.grad, alpha=-0.1 / self.state[p]["seen"])


def test_numbers_alone_are_reset_too_while_a_step_is_left(drive: Path) -> None:
    pair = Pair(ALL_ON_NVME, drive, partial(Numbers, lr=0.1))
    for act in (clear, pop, another_mapping, clear):
        context = context_of(pair.ours) if pair.steps else None
        if context is not None:
            context.lanes.update.submit(lambda: time.sleep(0.02))
        pair.train()
        pair.act(act)
        pair.train()
        pair.compare()


@pytest.mark.parametrize("tier", ["nvme", "device"])
def test_a_reset_makes_master_copies_anew(tier: str, tmp_path: Path) -> None:
    """As a new optimizer does."""
    models, optimizers = [], []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        model = sundry(torch.bfloat16)
        compiled(model, options_for((tier, tier, tier), tmp_path / folder, piece=128, master="float32"))
        models.append(model)
        optimizers.append(adamw(model.parameters()))
    for number in range(6):
        if number in (2, 4):
            optimizers[0].state.clear()
            optimizers[1] = adamw(models[1].parameters())
        assert train_step(models[0], optimizers[0], number) == train_step(models[1], optimizers[1], number)
    assert_same_states(*optimizers)
    assert "master" in optimizers[0].state[models[0].up.weight]


def test_reads_that_cannot_be_are_refused_and_say_what_to_do(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(ALL_ON_NVME, drive, sgd)
    pair.train(2)
    weight = pair.ours.up.weight
    entry = pair.optimizer.state[weight]
    assert "'momentum_buffer' (on a drive)" in repr(entry)
    with monkeypatch.context() as patch:
        patch.setattr(host_shortage, "usable_host_bytes", lambda: 4 * weight.numel() - 1)
        with pytest.raises(BudgetError, match=r"'momentum_buffer' of up.weight would take 684 .*; 683 bytes .* 760 bytes of"):
            entry["momentum_buffer"]
        patch.setattr(host_shortage, "usable_host_bytes", lambda: 4 * weight.numel())
        assert entry["momentum_buffer"].shape == weight.shape
        assert "momentum_buffer" in entry
    pair.act(clear)
    pair.train()
    with pytest.raises(StepFailedError, match=r"states of up.weight that were here are gone: .* keep a copy, dict\(states\)"):
        list(entry)
    pair.optimizer.state[weight]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises((StepFailedError, UnsupportedOptimizerError), match=r"'momentum_buffer' of SGD .*weight has shape \[3\]"):
        train_step(pair.ours, pair.optimizer, 9)
    del pair.optimizer.state[weight]["momentum_buffer"]
    del pair.other.state[pair.eager.up.weight]["momentum_buffer"]
    pair.act(lambda optimizer, _: optimizer.zero_grad())
    pair.train()
    entry = pair.optimizer.state[pair.ours.embedding.weight]
    seen: list[torch.Tensor] = []
    handle = pair.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(entry["momentum_buffer"]))
    pair.train()
    assert torch.equal(seen[0], pair.other.state[pair.eager.embedding.weight]["momentum_buffer"])
    handle.remove()
    module = sys.modules[torch.optim.SGD.__module__]
    update = vars(module)["sgd"]
    errors: list[str] = []

    def read_within(*args: Any, **kwargs: Any) -> None:
        for parameter in pair.ours.parameters():
            try:
                dict(pair.optimizer.state[parameter])
            except StepFailedError as error:
                errors.append(str(error))
        update(*args, **kwargs)

    monkeypatch.setattr(module, "sgd", read_within)
    pair.train()
    zinf_compile.synchronize()
    assert any("a step of SGD is under way, as in another thread beside it" in error for error in errors), errors


def test_memory_of_states_that_nobody_holds_is_let_go(drive: Path) -> None:
    pair = Pair(("device", "device", "nvme"), drive, sgd)
    pair.train(2)
    ledger = context_of(pair.ours).memory.host_ledger
    before = ledger.now()["states"]
    parameters = [p for p in pair.ours.parameters() if p.requires_grad and p.dim()]
    most = max(p.numel() for p in parameters) * 4
    for parameter in parameters:
        pair.optimizer.state[parameter]["momentum_buffer"].abs().max()
        assert ledger.now()["states"] - before <= 2 * most
    pair.train()
    assert ledger.now()["states"] == before
    entry = pair.optimizer.state[parameters[0]]
    del pair.optimizer
    pair.optimizers.clear()
    gc.collect()
    with pytest.raises(StepFailedError, match="is gone with its optimizer"):
        entry["momentum_buffer"]


def test_a_file_of_states_is_plain(drive: Path) -> None:
    pair = Pair(ALL_ON_NVME, drive, adamw)
    pair.train(2)
    whole = zinf_compile.full_optimizer_state_dict(pair.optimizer)
    for given in (pair.optimizer.state_dict(), whole, pair.optimizer.state[pair.ours.up.weight]):
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert all(type(entry) is dict for entry in found.get("state", {}).values())
    pair.optimizer.state.clear()
    zinf_compile.load_full_optimizer_state_dict(pair.optimizer, whole)
    pair.train()
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer.state = collections.defaultdict(dict)
    pair.optimizer.load_state_dict(saved)
    pair.train()
    pair.compare()
