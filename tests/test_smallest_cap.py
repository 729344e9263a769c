"""The caps that refusals name: given as they are, they train, and a byte less does not."""

from __future__ import annotations

import gc
import re
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import more
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime import chunks
from zinf_compile.runtime.bridge import FakeDevice, played_by
from zinf_compile.shortage import find_smallest

ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PIECE_NUMEL", 1 << 14)
        yield


class Stack(nn.Module):
    """Linear layers of these widths, of up to 6 MB each: default tiles cut some of them, at some caps."""

    def __init__(self, *widths: int, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False))
        self.tied = tied
        self.width = widths[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers) if self.tied else ():
            x = x @ layer.weight
        return x.square().mean()


def train(model: Stack, options: dict[str, Any], *, steps: int = 2, kind: Any = adamw) -> None:
    """Accumulate two batches, clip, step; what is held stays within the cap."""
    torch.compiler.reset()
    gc.collect()
    model.compile(backend=BACKEND, options={"compute": "fx", **options})
    optimizer = kind(model.parameters())
    for _ in range(steps):
        for _ in range(2):
            model(torch.ones(2, model.width)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()


def named_by(error: BudgetError, option: str = "device_memory") -> int:
    found = re.search(rf"the smallest(?: {option})? that works is ([\d,]+)", str(error), re.IGNORECASE)
    assert found, str(error)
    return int(found[1].replace(",", ""))


def refused(model: Stack, options: dict[str, Any], **how: Any) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        train(model, options, **how)
    return caught.value


tiers = st.sampled_from(["device", "nvme"])


@pytest.mark.parametrize("examples", [8, more(60)])
def test_exactly_the_bytes_that_are_named_train(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=examples < 10, database=None)
    @given(
        widths=st.lists(st.sampled_from([64, 300, 768, 1000, 1500]), min_size=2, max_size=4),
        tied=st.booleans(),
        away=st.one_of(st.just(ALL_AWAY), st.fixed_dictionaries(dict.fromkeys(ALL_AWAY, tiers))),
        tile=st.sampled_from([None, None, 1 << 18]),
        cap=st.sampled_from([1, 4 << 20, 8 << 20]),
    )
    def check(widths: list[int], tied: bool, away: dict[str, str], tile: int | None, cap: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {**away, **({"nvme": folder} if "nvme" in away.values() else {})}
            if tile is not None:
                options["tile"] = tile
            try:
                train(Stack(*widths, tied=tied), {**options, "device_memory": cap})
            except BudgetError as error:
                least = named_by(error)
                assert "nvme" not in str(error) or set(away.values()) != {"nvme"}, "where everything is there already"
                train(Stack(*widths, tied=tied), {**options, "device_memory": least})
                refused(Stack(*widths, tied=tied), {**options, "device_memory": least - 1})

    check()
