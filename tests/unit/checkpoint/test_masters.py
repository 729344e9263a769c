"""Checkpoints with master copies, loaded before the first step, onto partitioned and onto whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Saved = tuple[Path, Optimizer]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).bfloat16()


def partitioned(**options: Any) -> tuple[nn.Module, Optimizer]:
    """Return a model with master copies, and its optimizer."""
    with torch.device("meta"):
        model = net()
    zinf_compile.partition(model, master="float32", **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(params=["by dcp", "by zinf_compile"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Saved, Callable[..., Any]]:
    """Save after two steps; return where, the optimizer, and what loads it."""
    model, optimizer = partitioned()
    for _ in range(2):
        step(model, optimizer)
    folder = tmp_path / "saved"
    if request.param == "by zinf_compile":
        zinf_compile.save(folder, model, optimizer, wait=True)
        return (folder, optimizer), zinf_compile.load

    def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)

    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)
    return (folder, optimizer), load


def states(optimizer: Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    return {key: dict(sorted(state.items())) for key, state in optimizer.state_dict()["state"].items()}


@pytest.mark.parametrize("kind", ["device", "nvme"])
def test_a_fresh_optimizer_of_partitioned_parameters_gets_them(
    saved: tuple[Saved, Callable[..., Any]], kind: str, tmp_path: Path
) -> None:
    (folder, its), load = saved
    model, optimizer = partitioned(**({"optimizer": "nvme", "nvme": str(tmp_path)} if kind == "nvme" else {}))
    load(folder, model, optimizer)
    assert states(its)[0]["master"].dtype == torch.float32
    torch.testing.assert_close(states(optimizer), states(its), rtol=0, atol=0)
    step(model, optimizer)


def test_a_fresh_optimizer_of_whole_parameters_keeps_them_or_is_refused(saved: tuple[Saved, Callable[..., Any]]) -> None:
    (folder, its), load = saved
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if load is zinf_compile.load:
        load(folder, model, optimizer)
        torch.testing.assert_close(states(optimizer), states(its), rtol=0, atol=0)
        return
    with pytest.raises(zinf_compile.CheckpointError, match=r"master copies of 4 parameters, the first of them 0\.bias"):
        load(folder, model, optimizer)
    with pytest.raises(zinf_compile.StepFailedError, match=r"dcp\.load ended in its middle"):
        step(model, optimizer)
