"""Caps that are too small for their own default tiles: a graph has those of a smaller cap, as if option `tile` said so."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_stack import (
    ALL_AWAY,
    WIDTHS,
    Stack,
    default_tile,
    named_by,
    partitioned,
    refusal_of,
    seeded,
    tiles_of,
    too_small,
    train,
)
from tiers import context_of
from torch import nn
from training import BACKEND, adamw

from zinf_compile.cli.trace import trace
from zinf_compile.errors import BudgetError
from zinf_compile.ir.compute_shape import piece_of, tile_range
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import unit_of

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


class Halves(nn.Module):
    """Two graphs, of which the second one has the larger layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(768, 64, 768), Stack(*WIDTHS)
        self.width = 768

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.first(x)
        torch._dynamo.graph_break()
        return loss + self.second(x)


def away(folder: Path) -> dict[str, Any]:
    return {**ALL_AWAY, "nvme": str(folder)}


def test_blocks_that_are_compiled_one_by_one_have_tiles_of_their_own(tmp_path: Path) -> None:
    """Although they share the code of their forward, which was compiled before for the other one."""
    losses: list[float] = []
    for cap in (13 << 20, 40 << 20):
        torch.compiler.reset()
        torch.manual_seed(3)
        model = Halves()
        options = {"compute": "fx", "compute_shape": {"piece_numel": 1 << 18}, **away(tmp_path), "device_memory": cap}
        for block in (model.first, model.second):
            block.compile(backend=BACKEND, options=options)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            loss = model(torch.ones(2, 768))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert tiles_of(model.first) == {default_tile(cap)}
        assert (max(tiles_of(model.second), key=int) < default_tile(cap)) == (cap == 13 << 20)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4), "1,500 addends, rounded in another order"


def test_numbers_are_those_of_the_tiles_that_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = away(tmp_path)
    cap = too_small(options)
    model = seeded()
    with caplog.at_level(logging.INFO, logger="zinf_compile"):
        losses = train(model, {**options, "device_memory": cap})
    (tile,) = tiles_of(model)
    default = default_tile(cap)
    assert tile is not None
    assert tile < default
    assert f"default tiles of {default:,}: it has tiles of {tile:,}" in caplog.text
    assert losses == train(seeded(), {**options, "device_memory": cap, "tile": tile})


def test_the_caps_account_for_what_runs(tmp_path: Path) -> None:
    """What the graph would have taken with its default tiles isn't counted beside it."""
    options = away(tmp_path)
    cap = too_small(options)
    model = seeded()
    train(model, {**options, "device_memory": cap})
    reservations = context_of(model).memory.reservations
    assert reservations.planned("device") <= cap
    assert reservations.tiles_of is not None
    assert reservations.tiles_of < cap


def test_calls_with_other_sizes_keep_the_tiles(tmp_path: Path) -> None:
    options = away(tmp_path)
    cap = too_small(options)
    model = seeded()
    train(model, {**options, "device_memory": cap}, steps=1)
    before = tiles_of(model)
    for rows in (3, 1):
        model(torch.ones(rows, model.width)).backward()
    assert tiles_of(model) == before


def test_pieces_are_smaller_too(tmp_path: Path) -> None:
    options = {**away(tmp_path), "compute_shape": {}}
    widths = (768, 1500, 1500, 1500)
    cap = too_small(options, widths=widths)
    model = seeded(widths=widths)
    train(model, {**options, "device_memory": cap}, steps=1)
    reservations, numel = context_of(model).memory.reservations, sum(p.numel() for p in model.parameters())
    (piece,) = {unit_of(p).placement.piece_numel for p in model.parameters()}  # type: ignore[union-attr]
    assert piece == piece_of(numel, reservations.tiles_of)


@pytest.mark.parametrize("params", ["device", "nvme"])
def test_two_graphs_train_within_any_larger_cap(params: str, tmp_path: Path) -> None:
    """The first one leaves room for what the second one and steps will hold; the second one has smaller tiles by itself."""
    options = {**away(tmp_path), "params": params}
    least, refusal, seen = 0, "", set()
    while refusal or not least:
        least = named_by(refusal) if refusal else 1
        refusal = refusal_of(Halves(), {**options, "device_memory": least})  # type: ignore[arg-type]
    assert least < 22 << 20
    for cap in (least + (1 << 18), tile_range(least)[1], 22 << 20, 25 << 20, 40 << 20):
        model = Halves()
        train(model, {**options, "device_memory": max(cap, least)})  # type: ignore[arg-type]
        seen.add((*tiles_of(model.first), *tiles_of(model.second)))
    assert any(first != second for first, second in seen), seen
    assert any(first == second for first, second in seen), seen


@pytest.mark.parametrize(
    ("params", "device"),
    [("nvme", None), ("nvme", SimulatedDevice), ("host", SimulatedDevice)],
    ids=["nvme", "nvme beside a device", "host"],
)
def test_parameters_that_are_partitioned_are_cut_anew(params: str, device: Any, tmp_path: Path) -> None:
    """As long as nothing has used them: values are those that they had, and numbers those of the smaller tiles."""
    options = {**away(tmp_path), "params": params, "compute_shape": {}}
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(simulating(device()))
        cap = too_small(options)
        model = partitioned({**options, "device_memory": cap})
        before = [unit_of(p) for p in model.parameters()]
        assert tiles_of(model) == {default_tile(cap)}
        losses = train(model, {"device_memory": cap})
        (tile,) = tiles_of(model)
        assert tile is not None
        assert tile < default_tile(cap)
        assert [unit_of(p) for p in model.parameters()] == before
        same = partitioned({**options, "device_memory": cap, "tile": tile})
        assert losses == train(same, {"device_memory": cap})


def test_a_graph_that_fits_without_states_has_the_default_ones(tmp_path: Path) -> None:
    """Where states like Adam's don't fit with any: it may be trained by an optimizer without."""
    options = {**away(tmp_path), "optimizer": "device", "params": "device"}
    least = named_by(refusal_of(Stack(*WIDTHS), {**options, "device_memory": 1}))
    states = 2 * sum(p.numel() * 4 for p in Stack(*WIDTHS).parameters())
    cap = least - states // 2

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, fused=True)

    model = seeded()
    train(model, {**options, "device_memory": cap}, kind=sgd)
    assert tiles_of(model) == {default_tile(cap)}


def test_a_dump_shows_the_graphs_that_run(tmp_path: Path) -> None:
    options = {**away(tmp_path), "compute": "fx"}

    def target() -> tuple[nn.Module, torch.Tensor]:
        return Stack(*WIDTHS), torch.ones(2, 768)

    with pytest.raises(BudgetError) as caught:
        trace(target, options={**options, "device_memory": 1})
    cap = tile_range(named_by(str(caught.value)))[1]
    found = trace(target, options={**options, "device_memory": cap})
    assert [each.kind for each in found] == ["forward", "backward"]
    (tile,) = {each.shape.tile_bytes for each in found if each.shape is not None}
    assert tile is not None
    assert tile < default_tile(cap)


def test_compiled_regions_run_in_such_tiles(tmp_path: Path) -> None:
    options = {**away(tmp_path), "compute": "inductor"}
    cap = too_small({**options, "compute": "fx"})
    model = seeded()
    model.compile(backend=BACKEND, options={**options, "device_memory": cap})
    torch.compiler.reset()
    loss = model(torch.ones(2, model.width))
    loss.backward()
    expected = seeded()(torch.ones(2, model.width))
    torch.testing.assert_close(loss, expected)
