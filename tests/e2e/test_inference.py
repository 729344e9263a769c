"""Forwards without a backward, of models that are on a drive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import Meter, Traffic, compiled, context_of, options_for
from torch import nn
from training import assert_same

from zinf_compile.errors import UnsupportedModelError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

LAYERS, WIDTH = 16, 256
WHOLE = LAYERS * WIDTH * WIDTH * 4
CAP = WHOLE // 4


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack() -> Stack:
    """Return layers whose weights, together, are four times what may be on the device, each a whole number of pages."""
    torch.manual_seed(3)
    return Stack(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def forwards(call: Callable[[torch.Tensor], torch.Tensor], then: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    """Return the outputs of two forwards; `then` is called after each."""
    outputs = []
    for number in range(2):
        outputs.append(call(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))))
        then()
    return outputs


@pytest.mark.parametrize("compute", ["fx", pytest.param("inductor", marks=pytest.mark.tiers)])
@pytest.mark.parametrize("fake", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("frozen", "mode"), [(True, torch.inference_mode), (False, torch.no_grad)], ids=["frozen", "trained"])
def test_a_model_of_four_times_what_the_device_may_hold(
    frozen: bool, mode: Any, fake: bool, compute: str, tmp_path: Path
) -> None:
    """It never holds more, each forward reads each weight once, and the numbers are those of a model in memory."""
    model, other = stack().requires_grad_(not frozen), stack()
    device = SimulatedDevice() if fake else None
    meter, moved = Meter(device), []
    away = ("nvme", "device", "device") if frozen else ("nvme",) * 3
    options = options_for(away, tmp_path, piece=1 << 14, compute=compute, device_memory=CAP, bucket=CAP // LAYERS)
    with mode(), simulating(device) if device else contextlib.nullcontext():
        found = forwards(compiled(model, options), lambda: moved.append(meter.read(model)))
        assert 0 < context_of(model).memory.ledger.total()[1] <= CAP
        expected = forwards(other if compute == "fx" else compiled(other, {"compute": compute}))
    for number in range(2):
        assert_same(f"output {number}", expected[number], found[number])
    assert moved[1] == Traffic(read=WHOLE, to_device=WHOLE if fake else 0)


def test_a_model_made_in_inference_mode_stays_whole(tmp_path: Path) -> None:
    """PyTorch refuses what would take its memory from it, in words that say nothing of it."""
    with torch.inference_mode():
        model = stack()
        with pytest.raises(UnsupportedModelError, match=r"layers.0.weight, .* made in torch.inference_mode\(\).*no_grad"):
            compiled(model, options_for(("nvme", "device", "device"), tmp_path))(torch.ones(1, WIDTH))
        assert_same("output", forwards(stack())[0], forwards(model.forward)[0])


used: list[int] = []


@torch.library.custom_op("zinf_tests::noted_linear", mutates_args=())
def noted_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Note where the weight is that is computed with."""
    used.append(weight.data_ptr())
    return x @ weight.t()


@noted_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


class Noted(nn.Linear):
    """A layer that says where its weight was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer does."""
        return noted_linear(x, self.weight)


@pytest.mark.parametrize("rows", [WIDTH, 65], ids=["whole pages", "part of a page"])
def test_reads_land_in_the_memory_that_compute_uses(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is host memory; what ends inside a page goes through a buffer of the store, and is computed with there."""
    model = Stack(*(Noted(WIDTH, WIDTH, bias=False) for _ in range(3)), Noted(WIDTH, rows, bias=False))
    read: list[int] = []
    with torch.no_grad():
        call = compiled(model, options_for(("nvme", "device", "device"), tmp_path))
        forwards(call)
        (store,) = {p._zinf_unit.backing.shards.store for p in model.parameters() if isinstance(p, ShardedParameter)}  # type: ignore[union-attr]
        assert isinstance(store, Store)
        really = store.engine.read

        def noting(file: Any, offset: int, into: torch.Tensor, **others: Any) -> Any:
            read.append(into.data_ptr())
            return really(file, offset, into, **others)

        monkeypatch.setattr(store.engine, "read", noting)
        used.clear()
        call(torch.randn(4, WIDTH))
    assert len(used) == len(read) == 4
    assert read[:3] == used[:3]
    assert (read[3] == used[3]) == (rows == WIDTH)
    assert (store.staging.peak_bytes == 0) == (rows == WIDTH)
