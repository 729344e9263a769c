"""Models that are made for a device named without its number, as users do: they train as those that were moved there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import late
import pytest
import torch
from late_training import PLACEMENTS, Stack, on_drives
from rank_late import check
from torch import nn

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Stack(2)


def _partition(options: dict[str, str], folder: Path) -> nn.Module:
    return zinf_compile.partition(_on_meta(), device="late", **options)


def _partitioned(options: dict[str, str], folder: Path) -> nn.Module:
    with zinf_compile.partitioned(device="late", **options):
        return Stack(2)


def _load(options: dict[str, str], folder: Path) -> nn.Module:
    before = Stack(2)
    torch.save(before.state_dict(), folder / "saved.pt")
    model = _on_meta()
    model.compile(backend="zero_infinity", options={"compute": "fx", **options})
    zinf_compile.load(folder / "saved.pt", model, device="late")
    return model


WAYS: dict[str, Callable[[dict[str, str], Path], nn.Module]] = {
    "partition": _partition,
    "partitioned": _partitioned,
    "load": _load,
}


def _losses(model: nn.Module, device: str, called: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    batches, losses = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).to(device), []
    for batch in batches:
        loss = called(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", WAYS)
def test_a_device_without_its_number(way: str, tmp_path: Path) -> None:
    """The lanes of a drive's threads begin with their device, which has to have one."""
    torch.manual_seed(0)
    expected = _losses(plain := Stack(2), "cpu", plain)
    options = on_drives(PLACEMENTS["drive"], tmp_path)
    torch.manual_seed(0)
    with late.delays(0.0005, seed=6, chance=0.3):
        model = WAYS[way](options, tmp_path)
        assert {p.device for p in model.parameters()} == {torch.device("late:0")}
        if way != "load":
            model.compile(backend="zero_infinity", options={"compute": "fx"})
        assert _losses(model, "late", model) == expected
        torch.accelerator.synchronize()
    check()
