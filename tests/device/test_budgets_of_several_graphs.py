"""Memory of models of several graphs is never over budget either, what the loop holds of the call before included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import capped_run  # noqa: F401, it finds `support`
import pytest
import torch
from broken_models import Broken, FrozenWords, LossApart, Noticing, batch_of
from capped_stack import named_by
from named_cap import named_cap
from torch import nn

import zinf_compile
from zinf_compile.errors import BudgetError

SIZES = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB"}


def train(kind: type[nn.Module], options: dict[str, Any]) -> tuple[int, list[float]]:
    """Take two steps of two micro-batches, the last loss held while the next call runs; return the peak, and the losses."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = kind().to("late")
    call = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **SIZES, **options})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    batches = [batch_of(kind, number).to("late") for number in range(4)]
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    losses = []
    for number, batch in enumerate(batches):
        loss = call(batch)
        loss.backward()
        losses.append(loss.detach().cpu().item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    zinf_compile.synchronize()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated(), losses


@pytest.mark.parametrize("kind", [Broken, FrozenWords, LossApart, Noticing])
def test_the_device_holds_no_more_than_any_cap_allows(kind: type[nn.Module], tmp_path: Path) -> None:
    whole, expected = train(kind, {})
    options, cap = {"nvme": str(tmp_path)}, 1
    while True:
        try:
            peak, losses = train(kind, {**options, "device_memory": cap})
        except BudgetError as error:
            larger = named_cap(error)
            assert larger > cap
            cap = larger
            continue
        assert losses == expected
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}"
        if cap > whole:
            break
        cap += (whole - cap) // 3 + 100_000


class Block(nn.Module):
    """Blocks like it share graphs, each with parameters of its own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                torch._dynamo.graph_break()
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def steps_of(model: nn.Module) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), foreach=False), []
    for number in range(2):
        torch.manual_seed(number)
        loss = model(torch.randn(256, 64).to("late"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu().item())
    return found


def repeated(options: dict[str, Any], *, by_block: bool = False) -> tuple[Repeated, list[float]]:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Repeated().to("late")
    for part in model.blocks if by_block else [model]:
        part.compile(backend="zero_infinity", options={"compute": "fx", **options})
    return model, steps_of(model)


def homes_of(model: nn.Module) -> set[str]:
    placements = [p._zinf_unit.placement for p in model.parameters() if hasattr(p, "_zinf_unit")]
    return {str(tier) for each in placements for tier in (each.params, each.grads, each.optimizer)}


def test_a_cap_of_the_host_that_a_graph_names_holds_for_the_others_that_share_it(tmp_path: Path) -> None:
    options = {"nvme": str(tmp_path), "activations": "keep"}
    with pytest.raises(BudgetError) as refused:
        repeated({**options, "host_memory": 1})
    _, losses = repeated({**options, "host_memory": named_by(str(refused.value), "host_memory")})
    assert losses == repeated({"params": "device"})[1]


def test_blocks_that_share_a_graph_live_where_it_was_decided_while_there_is_room(tmp_path: Path) -> None:
    """Steps have one chunk at a time in host memory, whichever of the graphs planned for it."""
    model, _ = repeated({"nvme": str(tmp_path), "host_memory": "4MiB"}, by_block=True)
    assert homes_of(model) == {"device"}


def test_what_several_graphs_save_on_the_host_stays_within_its_cap() -> None:
    """Of one forward: each graph knows at its compilation what it saves itself."""
    near = dict.fromkeys(("params", "grads", "optimizer"), "device")
    expected, cap, refusals = repeated({"params": "device"}, by_block=True)[1], 1, []
    while True:
        try:
            model, losses = repeated({**near, "activations": "host", "host_memory": cap}, by_block=True)
        except BudgetError as error:
            refusals.append(str(error))
            cap = max(cap + 1, named_by(str(error), "host_memory"))
            continue
        break
    assert losses == expected
    peak = zinf_compile.stats(model)["memory"]["host"]["peak"]
    assert peak["activations"] <= peak["all"] <= cap
    assert any("are activations of earlier calls" in text for text in refusals)
