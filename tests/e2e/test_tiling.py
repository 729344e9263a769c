"""Parameters larger than a tile: cut, and computed with tile by tile."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import more
from models import TiedWords, loss_of, tokens
from tiers import options_for
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import BACKEND, assert_same

import zinf_compile
from zinf_compile.cli.trace import trace
from zinf_compile.config import Config
from zinf_compile.errors import OptionError
from zinf_compile.ir import tiling


def test_too_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MOST_TILES", 64)
    model = Net(nn.Linear(16, 1024, bias=False))
    model.compile(backend=BACKEND, options={"tile": 100})
    with pytest.raises(
        OptionError, match=r"cut parameter .*weight, shape \[1024, 16\].*into 1,024.*takes up to 64 .*tile of 2,048 bytes or more"
    ):
        model(torch.ones(1, 16))
    torch.compiler.reset()
    model.compile(backend=BACKEND, options={"tile": 2048})
    model(torch.ones(1, 16))


@pytest.mark.parametrize("tile", ["", 0, -1, "4 parsecs"])
def test_a_size_that_is_none(tile: object) -> None:
    model = Net(nn.Linear(4, 4))
    model.compile(backend=BACKEND, options={"tile": tile})
    with pytest.raises(OptionError, match="option tile="):
        model(torch.ones(1, 4))


class Net(nn.Module):
    """Layers one after the other. (Dynamo leaves modules of torch.nn themselves to eager code.)"""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Layers(nn.Module):
    """All that is computed in tiles: linear layers both ways, experts, an embedding."""

    def __init__(self, words: int = 13, width: int = 8, wide: int = 12, middle: int = 10, experts: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=2)
        self.linear = nn.Linear(width, wide)
        self.plain = nn.Parameter(torch.randn(wide, middle) / 3)
        self.experts = nn.Parameter(torch.randn(experts, middle, width) / 3)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.linear(self.words(words))) @ self.plain
        x = torch.bmm(x.expand(len(self.experts), -1, -1), self.experts).sum(0) + x @ self.experts[1]
        return F.cross_entropy(self.head(x), words)


def both(build: Callable[[], nn.Module], **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    model = build()
    return copy.deepcopy(model), _compiled(model, options)


def _compiled(model: nn.Module, options: dict[str, object]) -> nn.Module:
    model.compile(backend=BACKEND, options=options)
    return model


SMALLER = {100: (7, 8, 7, 7, 2), 8: (5, 4, 5, 3, 2)}
"""Sizes of `Layers` that are cut in the same ways into fewer tiles, each of which Inductor compiles; by the size of a tile."""


@pytest.mark.parametrize(
    ("tile", "compute"),
    [
        *(more(tile, compute) for tile in (256, 24) for compute in ("fx", "inductor")),
        (100, "fx"),
        more(100, "inductor"),  # of rows, as the head below
        (8, "fx"),
        pytest.param(8, "inductor", marks=pytest.mark.slow),
    ],
)
def test_layers_in_tiles(tile: int, compute: str) -> None:
    sizes = SMALLER.get(tile, ()) if compute == "inductor" or tile == 8 else ()
    eager, ours = both(lambda: Layers(*sizes), tile=tile, compute=compute)
    words = torch.randint(eager.words.num_embeddings, (21,), generator=torch.Generator().manual_seed(0))
    losses = [model(words) for model in (eager, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        # sums of 21 products at most 40 long: each rounds by less than 64 * 2**-24 of the largest
        bound = 64 * 2**-24 * one.grad.abs().max().item()
        torch.testing.assert_close(
            other.grad.full_tensor(), one.grad, rtol=0, atol=bound, msg=lambda t, name=name: f"{name}: {t}"
        )
    units = [p._zinf_unit for p in ours.parameters()]
    assert sum(len(unit.tiles) for unit in units) > len(units)


class Split(nn.Module):
    """Two layers whose outputs are split over tiles; returns what each gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 256), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x)
        return hidden, self.down(hidden)


def test_a_forward_whose_outputs_are_split_rounds_as_products_of_other_widths_may() -> None:
    """An element is a sum of the same products in both: each order of adding n of them is within n eps of the sum of magnitudes.

    The same bits would be more than processors give: their libraries choose the order by the width of the product.
    """
    torch.manual_seed(0)
    eager = Split()
    x = torch.randn(32, 48)
    ours = _compiled(copy.deepcopy(eager), {"tile": "8KiB"})
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            hidden, out = ours(x)
        expected = (F.linear(x, eager.up.weight, eager.up.bias), F.linear(hidden.detach(), eager.down.weight))
        magnitudes = (
            F.linear(x.abs(), eager.up.weight.abs(), eager.up.bias.abs()),
            F.linear(hidden.detach().abs(), eager.down.weight.abs()),
        )
        for found, wanted, magnitude, terms in zip((hidden, out), expected, magnitudes, (48 + 1, 256), strict=True):
            bound = 2 * terms * torch.finfo(torch.float32).eps * magnitude
            assert bool(((found - wanted).abs() <= bound).all())
    assert [len(p._zinf_unit.tiles) for p in ours.parameters()] == [7, 0, 8]


def test_an_index_out_of_range_is_still_an_error() -> None:
    _, ours = both(Layers, tile=100)
    for bad in (13, -1, 100):
        with pytest.raises(IndexError):
            ours(torch.tensor([1, bad, 2]))


def test_no_tokens() -> None:
    eager, ours = both(lambda: Net(nn.Embedding(13, 8), nn.Linear(8, 8)), tile=100)
    nothing = torch.empty(0, dtype=torch.long)
    assert ours(nothing).shape == eager(nothing).shape == (0, 8)


def test_sizes_that_change() -> None:
    eager, ours = both(TiedWords, tile=100)
    for length in (5, 7, 9, 4):
        batch = tokens(0, length=length)
        torch.testing.assert_close(loss_of(ours(*batch)), loss_of(eager(*batch)))


def test_tiles_are_told_at_the_first_compile(caplog: pytest.LogCaptureFixture) -> None:
    model = _compiled(Net(nn.Linear(64, 64), nn.Linear(64, 8)), {"device_memory": "4MiB"})
    with caplog.at_level(logging.INFO, "zinf_compile"):
        model(torch.ones(1, 64))
    assert "in tiles" not in caplog.text
    model = _compiled(Net(nn.Linear(64, 64), nn.Linear(64, 8)), {"tile": "4KiB"})
    with caplog.at_level(logging.INFO, "zinf_compile"):
        model(torch.ones(1, 64))
    assert "moves parameters in tiles (option tile): layers.0.weight in 4 of up to 4,096 bytes" in caplog.text


@pytest.mark.parametrize(("memory", "tile"), [(None, None), ("1MiB", None), ("4MiB", 1 << 20), ("100MiB", 16 << 20)])
def test_the_tile_that_follows_from_device_memory(memory: str | None, tile: int | None) -> None:
    assert Config(device_memory=memory).tile_bytes == tile


class Checkpointed(nn.Module):
    """A block that is recomputed, a frozen layer, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.frozen, self.head = nn.Linear(16, 48).requires_grad_(False), nn.Linear(48, 40)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: x + self.down(F.gelu(self.up(x))), self.words(words), use_reentrant=False)
        return F.cross_entropy(self.head(torch.tanh(self.frozen(x))), words.roll(1))


@pytest.mark.keeps_graphs
@pytest.mark.parametrize("way", ["clip", "clip by value", "scaled", "graph kept", "zeros"])
def test_ways_to_train(way: str, drive: Path) -> None:
    torch.manual_seed(3)
    eager = Checkpointed()
    ours = [copy.deepcopy(eager) for _ in range(2)]
    away = options_for(("nvme", "nvme", "nvme"), drive, piece=256)
    models = [eager, _compiled(ours[0], {"tile": 1024}), _compiled(ours[1], {"tile": 1024, **away})]
    for model in models:
        _train_in(way, model)
    found = [zinf_compile.full_state_dict(model) for model in ours]
    for name, value in eager.state_dict().items():
        assert_same(f"{name} off the device", found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-6)  # of 0.02 by which two steps move it


def _train_in(way: str, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled", init_scale=8.0)
    for step in range(2):
        for micro in range(2):
            words = torch.randint(40, (28,), generator=torch.Generator().manual_seed(2 * step + micro))
            loss = scaler.scale(model(words))
            if way == "graph kept":
                loss.backward(retain_graph=True)
            loss.backward()
        scaler.unscale_(optimizer)
        if way == "clip by value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=way != "zeros")


class Odd(nn.Module):
    """Uses that aren't computed in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean(-1)) * self.linear.weight.square().sum()


def test_other_uses_are_whole() -> None:
    eager, ours = both(Odd, tile=40)
    x = torch.randn(2, 6, 5)
    for model in (eager, ours):
        model(x).sum().backward()
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    eager, ours = both(lambda: Net(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), tile=512)
    x = torch.randn(16, 8)
    for model in (eager, ours):
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().mean()
        loss.backward()
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=2e-2, atol=2e-3)


class Words(nn.Module):
    """A head with a loss, tied to an embedding or with a bias."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(29, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 29, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.words(words))
        return F.cross_entropy(self.head(x), words.roll(1), ignore_index=4, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("tied", "compute", "tile_rows", "tiles", "chunks"),
    [
        (True, "fx", 7, 5, 3),
        (False, "fx", 7, 5, 3),
        pytest.param(True, "inductor", 12, 3, 2, marks=pytest.mark.slow),
        more(False, "inductor", 12, 3, 2),
    ],
)
def test_a_loss_in_chunks_over_a_head_in_tiles(tied: bool, compute: str, tile_rows: int, tiles: int, chunks: int) -> None:
    """Inductor compiles each tile's part of each chunk: of both it has fewer, the last of them shorter too."""
    shape = {"chunk_bytes": 4 * 29 * math.ceil(21 / chunks + 1)}
    eager, ours = both(lambda: Words(tied=tied), tile=tile_rows * 32, compute=compute, chunk_loss=True, compute_shape=shape)
    words = torch.randint(29, (21,), generator=torch.Generator().manual_seed(0))
    for model in (eager, ours):
        (3 * model(words)).backward()
    torch.testing.assert_close(ours(words), eager(words), rtol=1e-6, atol=0)
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        # at most 29 + 21 terms are added up, at two places, each within 2**-24 of the largest
        bound = 128 * 2**-24 * one.grad.abs().max().item()
        assert (other.grad.full_tensor() - one.grad).abs().max() <= bound, name
    assert len(ours.head.weight._zinf_unit.tiles) == tiles


def test_no_logits_and_no_whole_head_are_left_in_the_graph() -> None:
    options = {"tile": 7 * 32, "chunk_loss": True, "compute_shape": {"chunk_bytes": 4 * 29 * 8}}
    found = trace(lambda: (Words(tied=True), (torch.zeros(21, dtype=torch.long),)), options=options)
    assert [scheduled.kind for scheduled in found] == ["forward", "backward"]
    forward, backward = (scheduled.text for scheduled in found)
    assert "tiles of" not in forward + backward
    assert not re.search(r"all_gather\(words.weight[,)]", forward + backward)


def test_models_of_different_tiles_in_one_graph(tmp_path: Path) -> None:
    with zinf_compile.partitioned(grads="nvme", nvme=tmp_path, tile=1024):
        first = nn.Linear(16, 64)
    with zinf_compile.partitioned():
        second = nn.Linear(64, 4)
    torch.compile(lambda x: second(first(x)).sum(), backend=BACKEND)(torch.ones(2, 16)).backward()
    assert first.weight.grad is not None
    assert torch.equal(first.weight.grad.full_tensor(), first.weight.grad.full_tensor()[:, :1].expand(64, 16))
