"""What can't be saved, or asked for, is refused by name before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.intake import plan_intake
from zinf_compile.errors import CheckpointError, UnsupportedModelError


def saved(folder: Path, model: nn.Module, **given: Any) -> None:
    zinf_compile.save(folder, model, torch.optim.SGD(model.parameters()), **given)


@pytest.mark.parametrize("extra", [[1, 2], [("a", 1)], "text", 5, []])
def test_extra_is_a_mapping(extra: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"extra is a {type(extra).__name__}; accepted: a mapping"):
        saved(tmp_path / "none", nn.Linear(2, 2), extra=extra, wait=True)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_mask_is_not_lost(tmp_path: Path) -> None:
    array = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(CheckpointError, match=r"extra\.m is a MaskedArray; accepted"):
        saved(tmp_path, nn.Linear(2, 2), extra={"m": array}, wait=True)


@pytest.mark.parametrize("save", ["save", "save_safetensors", "full_state_dict"])
def test_a_model_on_meta_has_nothing_to_save(save: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    calls = {
        "save": lambda: saved(tmp_path / "x", model, wait=True),
        "save_safetensors": lambda: zinf_compile.save_safetensors(model, tmp_path / "x"),
        "full_state_dict": lambda: zinf_compile.full_state_dict(model),
    }
    with pytest.raises(UnsupportedModelError, match=r"weight and 1 more on the meta device: .* nothing was written"):
        calls[save]()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("folder", "error", "text"), [(5, TypeError, "a int is given"), ("a\0b", ValueError, "null character")])
def test_folders_are_paths(folder: Any, error: type[Exception], text: str) -> None:
    model = nn.Linear(2, 2)
    for call in (lambda: saved(folder, model, wait=True), lambda: zinf_compile.save_safetensors(model, folder)):
        with pytest.raises(error, match=text):
            call()


def test_rename_is_a_mapping_or_a_function() -> None:
    given: Any = 5
    with pytest.raises(CheckpointError, match=r"rename=5 is a int; accepted: a mapping .* or a function"):
        plan_intake({"a": torch.float32}, given, None, "here")
