"""Arguments that are swapped, or something else than what belongs there: an error names what was found and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.fit import named_optimizers
from zinf_compile.checkpoint.intake import plan_intake
from zinf_compile.errors import CheckpointError

CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "save, swapped": (lambda model, optimizer: zinf_compile.save(model, "folder", optimizer), "a str is given as the model"),
    "load, swapped": (lambda model, optimizer: zinf_compile.load(model, "folder", optimizer), "a str is given as the model"),
    "save, no folder": (
        lambda model, optimizer: zinf_compile.save(None, model),
        "a NoneType is given as the folder; accepted: a str",
    ),
    "load, no folder": (lambda model, optimizer: zinf_compile.load(3, model), "a int is given as the folder; accepted: a str"),
    "full_state_dict": (lambda model, optimizer: zinf_compile.full_state_dict(None), "a NoneType is given as the model"),
    "partition": (lambda model, optimizer: zinf_compile.partition(None), "a NoneType is given as the model"),
    "gathered": (lambda model, optimizer: zinf_compile.gathered(model.weight).__enter__(), "a Parameter is given as the model"),
    "save a scheduler": (
        lambda model, optimizer: zinf_compile.save("folder", model, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        "a ConstantLR is given as an optimizer; accepted: an Optimizer of torch.optim, or several",
    ),
    "states of a model": (
        lambda model, optimizer: zinf_compile.full_optimizer_state_dict(model),
        "a Linear is given as an optimizer",
    ),
    "states into a model": (
        lambda model, optimizer: zinf_compile.load_full_optimizer_state_dict(model, {}),
        "a Linear is given as an optimizer",
    ),
    "stats of an optimizer": (lambda model, optimizer: zinf_compile.stats(optimizer), "a SGD is given as the model"),
    "memory": (lambda model, optimizer: zinf_compile.memory(None), "a NoneType is given as the model"),
    "timeline": (lambda model, optimizer: zinf_compile.timeline(optimizer), "a SGD is given as the model"),
    "report_steps": (lambda model, optimizer: zinf_compile.report_steps(optimizer), "a SGD is given as the model"),
    "precision of a model": (lambda model, optimizer: zinf_compile.keep_precision(model), "a Linear is given as an optimizer"),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model_and_no_optimizer_is_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, message = CALLS[call]
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=message):
        act(model, torch.optim.SGD(model.parameters()))
    assert not list(tmp_path.iterdir())


def test_optimizers_come_from_any_iterable() -> None:
    one, two = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    assert named_optimizers({"a": one, "b": two}.values()) == [("optimizer.0", one), ("optimizer.1", two)]  # type: ignore[arg-type]
    assert named_optimizers(one) == [("optimizer", one)]


@pytest.mark.parametrize("save", [zinf_compile.save_safetensors, lambda model, folder: zinf_compile.save(folder, model)])
def test_a_file_in_the_place_of_a_folder_is_named(save: Callable[[nn.Module, Path], object], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=r"a file has this name; accepted: a folder.*model\.safetensors"):
        save(nn.Linear(2, 2), file)
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(NotADirectoryError, match=r"the folder can't be made; accepted: one that is there.*/dev/null/saved"):
        zinf_compile.save("/dev/null/saved", nn.Linear(2, 2))


def test_what_is_no_mapping_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(zinf_compile.UnsupportedModelError, match=r"given a int; accepted: a mapping of names to tensors"):
        zinf_compile.load_full_state_dict(model, 3)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(zinf_compile.UnsupportedOptimizerError, match=r"given a list; accepted: a mapping with 'state'"):
        zinf_compile.load_full_optimizer_state_dict(optimizer, [3])  # type: ignore[arg-type]


def test_an_init_that_cannot_be_called_leaves_the_model_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"init=3 can't be called; accepted: a function of one module"):
        zinf_compile.partition(model, init=3)  # type: ignore[arg-type]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", "'bfloat16' is a str"), ({"weight": 16}, "16 is a int")])
def test_a_type_to_load_in_is_one_of_pytorchs(dtype: Any, found: str) -> None:
    with pytest.raises(CheckpointError, match=f"dtype={found}; accepted: a torch.dtype.*Nothing was changed"):
        plan_intake({"weight": torch.float32}, None, dtype, "folder")
