"""Plain files of `torch.save`: the forms in which state dicts are usually saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zinf_compile
from zinf_compile.errors import CheckpointError


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that has taken two steps, one of its parameters frozen."""
    torch.manual_seed(0)
    model, optimizer = made(0.25)
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def made(lr: float, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer, in two groups."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    model[0].bias.requires_grad_(False)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "weight_decay": 0.5}]
    return model, kind(groups, lr=lr)  # type: ignore[call-arg]


FORMS: dict[str, Any] = {
    "model and optimizer": lambda m, o: {"model": m, "optimizer": o, "epoch": 3, "rng": torch.arange(3, dtype=torch.uint8)},
    "PyTorch's tutorial": lambda m, o: {"model_state_dict": m, "optimizer_state_dict": o, "epoch": 3},
    "Lightning": lambda m, o: {"state_dict": m, "optimizer_states": [o], "epoch": 3, "lr_schedulers": [], "callbacks": {}},
}


@pytest.mark.parametrize("form", FORMS)
def test_usual_forms(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(FORMS[form](model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    again, its = made(0.5)
    extra = zinf_compile.load(tmp_path / "saved.pt", again, its)
    assert extra["epoch"] == 3
    assert "rng" not in extra or torch.equal(extra["rng"], torch.arange(3, dtype=torch.uint8))
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(its.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert [(g["lr"], g["weight_decay"]) for g in its.param_groups] == [(0.25, 0.01), (0.25, 0.5)]


def test_a_state_dict_alone(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    again, its = made(0.5)
    assert zinf_compile.load(tmp_path / "saved.pt", again) == {}
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="0 optimizers in the checkpoint, 1 given"):
        zinf_compile.load(tmp_path / "saved.pt", again, its)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("names", [("words.weight",), ("head.weight",), ("words.weight", "head.weight")])
def test_one_name_of_a_tied_weight_is_enough(names: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {name: value for name, value in Tied().state_dict().items() if name in names}
    torch.save(saved, tmp_path / "saved.pt")
    for load in (
        lambda model: zinf_compile.load(tmp_path / "saved.pt", model),
        lambda model: zinf_compile.load_full_state_dict(model, saved),
    ):
        model = Tied()
        load(model)
        assert torch.equal(model.words.weight, saved[names[0]])
        assert model.head.weight is model.words.weight


class ReadWhenAsked(Mapping[str, torch.Tensor]):
    """A state dict whose values are made at each read; knows how many were alive at once."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        self.like, self.alive, self.most = like, weakref.WeakSet[torch.Tensor](), 0

    def __getitem__(self, name: str) -> torch.Tensor:
        value = torch.full_like(self.like[name], len(name))
        self.alive.add(value)
        self.most = max(self.most, len(self.alive))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def test_values_that_are_read_when_asked_for_are_not_all_read_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)), Tied())
    state = ReadWhenAsked({name: value for name, value in model.state_dict().items() if name != "8.head.weight"})
    zinf_compile.load_full_state_dict(model, state)
    assert all((value == len(name)).all() for name, value in model.state_dict().items() if name != "8.head.weight")
    assert state.most <= 3


def test_a_file_of_safetensors_says_what_loads_it(tmp_path: Path) -> None:
    save_file({"words.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no file of torch.save.*load_full_state_dict\(model, safetensors"):
        zinf_compile.load(tmp_path / "model.safetensors", Tied())


def test_objects_beside_are_left_out(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({"model": model.state_dict(), "args": {"path": Path("a"), "lr": 0.1}, "schedule": object}, tmp_path / "saved.pt")
    assert zinf_compile.load(tmp_path / "saved.pt", made(0.5)[0]) == {"args": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(optimizer=5), "0 optimizers in the checkpoint, 1 given"),
        (lambda s: s.update(optimizer={"state": {}}), "has no state dict of an optimizer"),
        (lambda s: s["optimizer"]["param_groups"].pop(), "1 groups of parameters in the checkpoint, 2 are given"),
        (lambda s: s["optimizer"]["param_groups"][0]["params"].append(9), "group 0 of optimizer lacks"),
        (lambda s: s["optimizer"]["state"][0].update(zinf_layout={"rank": 0}), "one rank's own shards of an optimizer's states"),
        (lambda s: s["model"].pop("0.weight"), "missing: 0.weight"),
        (lambda s: s.pop("model"), "has no state dict of a model"),
    ],
)
def test_what_does_not_fit_is_explained(change: Any, said: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    change(saved)
    torch.save(saved, tmp_path / "saved.pt")
    again, its = made(0.5)
    before = {name: value.clone() for name, value in again.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        zinf_compile.load(tmp_path / "saved.pt", again, its)
    assert said in str(caught.value)
    torch.testing.assert_close(dict(again.state_dict()), before, rtol=0, atol=0)
    assert not its.state


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    again, its = made(0.5, torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"one with exp_avg, exp_avg_sq in the checkpoint, SGD is given"):
        zinf_compile.load(tmp_path / "saved.pt", again, its)


def test_files_of_old_pytorch_are_explained(tmp_path: Path) -> None:
    torch.save(trained()[0].state_dict(), tmp_path / "saved.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"PyTorch before 1\.6 has written is loaded and saved again"):
        zinf_compile.load(tmp_path / "saved.pt", made(0.5)[0])
