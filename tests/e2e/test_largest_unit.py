"""The largest unit of a graph: brought ahead of its use where memory has room for it, however many buckets it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.cli.trace import trace
from zinf_compile.errors import BudgetError
from zinf_compile.passes.analysis.gather_stages import peak_ahead
from zinf_compile.passes.schedule.prefetch import choose_stages
from zinf_compile.sharded.parameter import ShardedParameter

BUCKET = 4096
LARGE = 64 * 512 * 4
"""Bytes of the largest unit: eight buckets."""


class Heavy(nn.Module):
    """Small layers around a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.large = nn.Linear(64, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def scheduled(options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    graphs = trace(lambda: (Heavy(), torch.randn(8, 64)), options={"bucket": BUCKET, **options}, world_size=2)
    return next(graph.text for graph in graphs if graph.kind == "forward")


NVME = {"params": "nvme", "grads": "device", "optimizer": "device", "nvme": "/nowhere"}
"""All by words: what is decided by caps has room for the steps, too."""


def starts(text: str, what: str) -> tuple[int, int]:
    """Return before which product, and before which wait, the large unit's transfer begins."""
    before = text[: re.search(rf"{what}\(large", text).start()]  # type: ignore[union-attr]
    return before.count("= mm("), before.count("= wait(")


@pytest.mark.parametrize(("options", "free"), [({}, 1), (NVME, 0)], ids=["device", "nvme"])
def test_it_starts_before_the_region_ahead_of_its_own_where_memory_has_room(options: dict[str, Any], free: int) -> None:
    operator = "swap_in" if options else "all_gather"
    assert starts(scheduled(options), operator)[0] == free
    with pytest.raises(BudgetError) as refusal:
        trace(lambda: (Heavy(), torch.randn(8, 64)), options={"bucket": BUCKET, **options, "device_memory": 1}, world_size=2)
    least = int(re.findall(r"needs ([\d,]+) bytes", str(refusal.value))[0].replace(",", ""))  # without states, which come later
    tight = scheduled({**options, "device_memory": least})
    assert starts(tight, operator)[0] == 2, "just in time, where nothing else fits"
    order = re.compile(r"(?:all_gather|reduce_scatter)\(\w+.*?(?=,|\))")
    assert [m.split("(")[0] for m in order.findall(tight)] == [m.split("(")[0] for m in order.findall(scheduled(options))]


def test_what_one_stage_ahead_takes_is_what_unbounded_prefetching_holds() -> None:
    sizes = [1, 8, 1, 2]
    released = [[(0, 1)], [(1, 8)], [(3, 1)], [(3, 2)]]
    assert peak_ahead(sizes, released, stages=1) == 9
    most = peak_ahead(sizes, released, stages=2)
    assert choose_stages(sizes, released, look_ahead=2, limit_bytes=most) == [0, 0, 0, 1]
    assert choose_stages(sizes, released, look_ahead=2, limit_bytes=most - 1) != [0, 0, 0, 1]


@pytest.mark.parametrize("extra", [None, LARGE // 2, 0], ids=["no cap", "some room", "no room"])
def test_what_is_held_stays_within_the_cap(extra: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer"), "nvme") | {"nvme": tmp_path, "bucket": BUCKET}
    if extra is not None:
        with pytest.raises(BudgetError) as refusal:
            train({**options, "device_memory": 1})
        least = int(re.findall(r"that works is ([\d,]+)", str(refusal.value))[0].replace(",", ""))
        options["device_memory"] = least + extra
    peak, cap = train(options)
    assert extra is None or peak <= cap
    assert extra is not None or peak >= LARGE + BUCKET


def train(options: dict[str, Any]) -> tuple[int, int]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Heavy()
    model.compile(backend=BACKEND, options={"compute": "fx", **options})
    optimizer = adamw(model.parameters())
    for number in range(2):
        model(torch.randn(8, 64)).backward()
        if not number:
            parameter = model.first.weight
            assert isinstance(parameter, ShardedParameter)
            context = parameter._zinf_unit.context
            context.memory.ledger.forget_peaks()
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()
    assert context.memory.reservations.device_cap is not None
    return context.memory.ledger.total()[1], context.memory.reservations.device_cap
