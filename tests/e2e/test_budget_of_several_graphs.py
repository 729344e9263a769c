"""Caps on models of several graphs: the first leaves room for the others, and all for what the caller holds of earlier calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_models import Broken, FrozenWords, Layers, LossApart, Noticing, batch_of
from named_cap import named_cap
from torch import nn
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.sharded.parameter import ShardedParameter


def losses_of(model: nn.Module, call: Callable[..., torch.Tensor]) -> list[float]:
    """Take two steps of two micro-batches, in a loop that holds the last loss while the next call runs."""
    optimizer, found = adamw([p for p in model.parameters() if p.requires_grad]), []
    for number in range(4):
        loss = call(batch_of(type(model), number))
        loss.backward()
        found.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return found


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


class Trial:
    """Trains one kind of model within caps; each time another model from the same seed, against eager."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        self.kind, self.options = kind, options
        model = seeded(kind)
        self.eager = losses_of(model, model)

    def train(self, cap: int) -> nn.Module:
        torch.compiler.reset()
        zinf_compile.reset()
        model = seeded(self.kind)
        model.compile(backend=BACKEND, options={**self.options, "device_memory": cap})
        found = losses_of(model, model)
        if any(len(p._zinf_unit.boxes) > 1 for p in model.parameters() if isinstance(p, ShardedParameter)):
            assert found == pytest.approx(self.eager, rel=1e-5), "products of tiles may be rounded otherwise"
        else:
            assert found == self.eager
        return model

    def least(self, *, refusals: int) -> int:
        """Follow the caps that are named, from one byte on; return the first that trains, after so many refusals at most."""
        cap = 1
        for _ in range(refusals):
            try:
                self.train(cap)
            except BudgetError as error:
                cap = named_cap(error)
            else:
                return cap
        self.train(cap)
        return cap


def test_the_first_graph_leaves_room_for_the_second(tmp_path: Path) -> None:
    trial = Trial(Broken, nvme=str(tmp_path))
    least = trial.least(refusals=2)
    states = 4 * sum(4 * p.numel() for p in Broken().parameters())
    assert least < states, "all in memory would take more: nothing of it has to stay there"
    for more in (100_000, 1_000_000, 2_000_000, 4_000_000):
        trial.train(least + more)


def test_leaves_that_autograd_keeps_from_the_call_before_are_planned_for(tmp_path: Path) -> None:
    trial = Trial(FrozenWords, nvme=str(tmp_path))
    least = trial.least(refusals=2)
    for more in (50_000, 3_000_000):
        trial.train(least + more)


def test_a_loss_without_parameters_is_no_reason_to_move_what_fits(tmp_path: Path) -> None:
    """Others have parameters, but a graph without any is no measure of what they save."""
    trial = Trial(LossApart, nvme=str(tmp_path))
    model = trial.train(64 << 20)
    parameter = next(model.parameters())
    assert isinstance(parameter, ShardedParameter)
    saved = parameter._zinf_unit.context.memory.saved
    assert [set(each) - {"keep"} for each in saved.values() if any(each.values())] == [set(), set()]


def test_a_graph_compiled_again_while_its_loss_is_held_trains_at_the_cap_that_is_named(tmp_path: Path) -> None:
    trial = Trial(Noticing, nvme=str(tmp_path))
    least = trial.least(refusals=1)
    with pytest.raises(BudgetError):
        trial.train(least - 1)


class Changed(nn.Module):
    """Its forward is another one after the first step, of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.sums = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum() if self.sums else x.square().mean()


def test_a_graph_compiled_again_after_a_step_counts_the_chunk_that_is_held_once(tmp_path: Path) -> None:
    def train(cap: int | None) -> list[float]:
        torch.compiler.reset()
        zinf_compile.reset()
        model = seeded(Changed)
        if cap is not None:
            homes = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
            model.compile(backend=BACKEND, options={**homes, "nvme": str(tmp_path), "device_memory": cap})
        optimizer, found = adamw(model.parameters()), []
        for number in range(3):
            model.sums = number > 0
            found.append(plain_step(model, optimizer, (torch.ones(64, 256),)).item())
        return found

    with pytest.raises(BudgetError) as refused:
        train(1)
    assert train(named_cap(refused.value)) == train(None)


def adversarial_losses(models: Sequence[nn.Module]) -> list[float]:
    """Take two steps of two models with an optimizer each, of which one reads what the other makes."""
    makes, judges = models
    optimizers, found = [adamw(model.parameters()) for model in models], []
    for number in range(2):
        x = batch_of(Broken, number)
        for loss_of, optimizer in zip(
            (lambda x: judges(makes(x).detach()), lambda x: judges(makes(x))), optimizers[::-1], strict=True
        ):
            loss = loss_of(x).square().mean()
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
    return found


def test_two_models_with_an_optimizer_each_train_at_the_cap_that_is_named_and_at_larger_ones(tmp_path: Path) -> None:
    """Each step has chunks of its own: what is refused is refused before anything was updated."""

    def models() -> list[nn.Module]:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        return [Layers(), Layers()]

    def train(cap: int) -> None:
        made = models()
        for model in made:
            model.compile(backend=BACKEND, options={"nvme": str(tmp_path), "optimizer": "nvme", "device_memory": cap})
        assert adversarial_losses(made) == expected

    expected, cap, refusals = adversarial_losses(models()), 1, []
    for _ in range(4):
        try:
            train(cap)
        except BudgetError as error:
            refusals.append(str(error))
            cap = named_cap(error)
    assert refusals
    assert not [text for text in refusals if "nothing was updated" in text], "by a graph, not by a step"
    for more in (0, 300_000, 1_000_000, 3_000_000, 6_000_000):
        train(cap + more)


def test_beside_graphs_of_no_cap_a_model_trains_within_its_own(tmp_path: Path) -> None:
    torch.compiler.reset()
    zinf_compile.reset()
    kept = seeded(Broken)
    away = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(tmp_path)}
    kept.compile(backend=BACKEND, options=away)
    expected = losses_of(kept, kept)
    model = seeded(Broken)
    model.compile(backend=BACKEND, options={"device_memory": "24MiB"})
    assert losses_of(model, model) == expected
    assert all(isinstance(p, ShardedParameter) for p in (*kept.parameters(), *model.parameters()))


def test_graphs_whose_parameters_are_gone_reserve_nothing(tmp_path: Path) -> None:
    """Dynamo may keep such graphs: here what runs behind the break, in the module's globals. Theirs was read far ahead."""

    def train(**options: Any) -> None:
        model = seeded(Broken)
        model.compile(backend=BACKEND, options=options)
        losses_of(model, model)
        zinf_compile.synchronize()  # the states of its last step are gone with it, too

    torch.compiler.reset()
    zinf_compile.reset()
    train(params="nvme", grads="nvme", optimizer="nvme", nvme=str(tmp_path))
    gc.collect()
    train(device_memory="24MiB")


@pytest.mark.parametrize("kept", ["the model", "a loss"])
def test_a_model_without_a_cap_takes_no_room_from_a_later_one_within_its_own(tmp_path: Path, kept: str) -> None:
    """How far the earlier one runs ahead is its own wish, and larger than that cap."""
    held: list[Any] = []

    def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        optimizer = adamw(model.parameters())
        for _ in range(2):
            loss = call(torch.ones(3, 6)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        held.append(model if kept == "the model" else loss)
        return model

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))

    away = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(tmp_path)}
    eager = made()
    train(eager, eager)
    for options in (away, {"device_memory": "64MiB"}, {**away, "device_memory": "64MiB"}):
        model = made()
        train(model, torch.compile(model, backend=BACKEND, options=options))
        with zinf_compile.gathered(model):
            assert all(map(torch.equal, model.parameters(), eager.parameters()))
