"""Checkpoints that plain PyTorch has saved by `dcp.save`, read onto a partitioned model by `dcp.load`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def partitioned() -> tuple[nn.Module, Optimizer]:
    """Return a model that was on meta, and its optimizer."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    zinf_compile.partition(model)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Optimizer]:
    """Save as PyTorch's users do."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved", model, optimizer


def test_the_model_alone(saved: tuple[Path, nn.Module, Optimizer]) -> None:
    folder, other, _ = saved
    model, _ = partitioned()
    dcp.load(zinf_compile.dcp_state_dict(model), checkpoint_id=folder, no_dist=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


def test_an_optimizer_has_no_settings_there(saved: tuple[Path, nn.Module, Optimizer]) -> None:
    folder, _, _ = saved
    model, optimizer = partitioned()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer\.settings"):
        dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not optimizer.state
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()


def test_as_one_file_it_loads(saved: tuple[Path, nn.Module, Optimizer]) -> None:
    folder, other, its = saved
    dcp_to_torch_save(folder, folder / "file.pt")
    model, optimizer = partitioned()
    zinf_compile.load(folder / "file.pt", model, optimizer)
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], its.state_dict()["state"], rtol=0, atol=0)
