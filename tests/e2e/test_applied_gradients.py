"""Gradients that a step has applied are not saved; what is accumulated on top of them is, as the sum that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import Placement, compiled, options_for, sundry, words
from training import adamw, whole_gradient

import zinf_compile
from zinf_compile.checkpoint.saved_files import SavedFiles

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def saved_gradients(folder: Path, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Save; return the gradients in the checkpoint by name."""
    files = SavedFiles(zinf_compile.save(folder, model, optimizer, wait=True))
    found = {key.removeprefix("gradient."): files.whole(key) for key in files.tensors if key.startswith("gradient.")}
    files.close()
    return found


@pytest.mark.parametrize("placement", [("device",) * 3, ("nvme",) * 3])
def test_they_are_saved_until_a_step_applies_them(placement: Placement, tmp_path: Path) -> None:
    model = compiled(sundry(), options_for(placement, tmp_path))
    optimizer = adamw(model.parameters())
    folder = tmp_path / "saved"
    model(words(0, 0)).backward()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert saved_gradients(folder, model, optimizer).keys() == names
    optimizer.step()
    assert not saved_gradients(folder, model, optimizer), "between step() and zero_grad()"
    model(words(0, 1)).backward()
    sums = saved_gradients(folder, model, optimizer)
    assert sums.keys() == names
    assert all(torch.equal(sums[name], whole_gradient(p)) for name, p in model.named_parameters() if p.requires_grad)
    optimizer.step()
    optimizer.zero_grad()
    model(words(1, 0)).backward()
    assert saved_gradients(folder, model, optimizer).keys() == names
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not any(map(torch.any, saved_gradients(folder, model, optimizer).values()))
