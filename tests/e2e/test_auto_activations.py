"""`activations="auto"`: as many saved values leave as a declared `device_memory` has no room for; the bits of keeping them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_blocks import take_step
from compute_models import allocated_at_most
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ROWS, WIDTH, BLOCKS = 2048, 128, 12
VALUE = ROWS * WIDTH * 4
"""Bytes of one saved value."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(torch.sin(x))))


class Model(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.breaks and number % 2:
                torch._dynamo.graph_break()
        return x.square().mean()


class Run:
    """A model, trained for some steps of two micro-batches; its graphs are one, several, or one for all blocks."""

    def __init__(self, options: dict[str, Any], *, graphs: str = "one") -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        self.model = Model(breaks=graphs == "several")
        self.optimizer = adamw(self.model.parameters())
        for part in self.model.blocks if graphs == "blocks" else [self.model]:
            part.compile(backend=BACKEND, options={"compute": "fx", **options})
        self.batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(2)]
        self.losses: list[float] = []

    def step(self, *, in_flight: bool = False) -> None:
        self.losses += take_step(self.model, self.optimizer, self.batches, in_flight=in_flight)


def memory_of(model: nn.Module) -> Any:
    parameter = next(p for p in model.parameters() if isinstance(p, ShardedParameter))
    return parameter._zinf_unit.context.memory


def least(options: dict[str, Any]) -> int:
    """Return the smallest device_memory that a refusal names. The same is not asked for twice: a refusal takes a compilation."""
    asked = repr(sorted(options.items()))
    if asked not in _least:
        with pytest.raises(BudgetError) as refused:
            Run({**options, "device_memory": 1}).step()
        found = re.search(r"smallest that works is ([\d,]+)", str(refused.value))
        assert found is not None, str(refused.value)
        _least[asked] = int(found[1].replace(",", ""))
    return _least[asked]


_least: dict[str, int] = {}
"""Caps that were named so far, by what was asked."""


def held_at_most(run: Run, options: dict[str, Any]) -> int:
    """Return the most bytes that PyTorch's allocator and the runtime held in a step, with the input of a call."""
    held = memory_of(run.model).ledger.total()[0]
    return held + VALUE + allocated_at_most(run.step)


def written(run: Run) -> int:
    return int(zinf_compile.stats(run.model)["links"]["host to nvme"]["bytes_last_step"])


def test_the_least_cap_and_larger_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The least that works is named, and less is refused; larger caps move less, none where all fits; the bits are the same."""
    words = {**dict.fromkeys(("params", "grads", "optimizer"), "device"), "bucket": "32MiB"}
    drive = {**words, "nvme": str(tmp_path)}
    kept, moved = least({**words, "activations": "keep"}), least(drive)
    assert moved < kept - 8 * VALUE
    assert least({**drive, "activations": "nvme"}) >= moved
    expected = Run({})
    expected.step()
    values, before = full(expected), None
    for cap in (moved, (moved + kept) // 2, kept):
        run = Run({**drive, "device_memory": cap})
        with caplog.at_level("INFO", logger="zinf_compile"):
            run.step()
        assert run.losses == expected.losses
        assert all(torch.equal(one, other) for one, other in zip(full(run), values, strict=True))
        peak = held_at_most(run, drive)
        assert peak <= cap
        assert before is None or written(run) < before
        before = written(run)
        said = re.findall(r"plan for activations .*\n  activations  (.*)", caplog.text)
        assert bool(said) == (before > 0)
        caplog.clear()
    assert before == 0, "everything fits: everything is kept"
    with pytest.raises(BudgetError, match=f"works is {moved:,}"):
        Run({**drive, "device_memory": moved - 1}).step()


def full(run: Run) -> list[torch.Tensor]:
    return list(zinf_compile.full_state_dict(run.model).values())


def test_together_with_homes(tmp_path: Path) -> None:
    """Parameters, gradients, states and saved values under one cap: less than any of them alone could be brought to."""
    drive = {"nvme": str(tmp_path), "bucket": 70_000, "compute_shape": {"piece_numel": 8192}}
    smallest, kept = least(drive), least({**drive, "activations": "keep"})
    assert smallest < kept - 8 * VALUE
    expected = Run({"compute_shape": {"piece_numel": 8192}})
    expected.step()
    for cap in (smallest, (smallest + kept) // 2):
        run = Run({**drive, "device_memory": cap})
        run.step()
        assert run.losses == expected.losses
        stats = zinf_compile.stats(run.model)
        assert stats["memory"]["device"]["peak"]["all"] <= cap
    with pytest.raises(BudgetError, match=f"works is {smallest:,}"):
        Run({**drive, "device_memory": smallest - 1}).step()


def test_a_second_forward_in_flight_is_refused_by_name(tmp_path: Path) -> None:
    """What is decided is for one forward at a time; graphs without a backward save nothing."""
    words = dict.fromkeys(("params", "grads", "optimizer"), "device")
    kept = least({**words, "activations": "keep"})
    expected = Run({})
    expected.step()
    drive = {**words, "nvme": str(tmp_path), "device_memory": kept - 4 * VALUE}
    run = Run(drive)
    with torch.no_grad():
        run.model(torch.ones(ROWS, WIDTH))
    with pytest.raises(BudgetError, match=r"activations and results of earlier calls .* activations='nvme' moves"):
        run.step(in_flight=True)
    run.optimizer.zero_grad()
    run.step()
    assert run.losses == expected.losses
    forced = Run({**drive, "activations": "nvme"})
    forced.step(in_flight=True)
    assert forced.losses == expected.losses


@pytest.mark.parametrize("graphs", ["several", "blocks"])
def test_each_of_several_graphs_has_its_share(graphs: str, tmp_path: Path) -> None:
    words = dict.fromkeys(("params", "grads", "optimizer"), "device")
    expected = Run({}, graphs=graphs)
    expected.step()
    cap = least({**words, "activations": "keep"}) - 10 * VALUE
    run = Run({**words, "nvme": str(tmp_path), "device_memory": cap}, graphs=graphs)
    run.step()
    assert run.losses == expected.losses
    decided = zinf_compile.stats(run.model)["activations"]
    assert decided["nvme"] > 0
    assert decided["peak"] <= cap


def test_dynamic_sizes_are_kept_and_later_graphs_decide_anew(tmp_path: Path) -> None:
    """A second batch of another size makes a graph of dynamic sizes, whose values stay: it works where they fit."""
    words = dict.fromkeys(("params", "grads", "optimizer"), "device")
    cap = least({**words, "activations": "keep"}) - 4 * VALUE
    losses = []
    for options in ({}, {**words, "nvme": str(tmp_path), "device_memory": cap}):
        run = Run(options)
        for rows in (ROWS, ROWS // 2, ROWS // 4):
            loss = run.model(torch.ones(rows, WIDTH))
            loss.backward()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    decided = zinf_compile.stats(run.model)["activations"]
    assert decided["nvme"] > 0, "of the first graph"
    assert decided["keep"] > 3 * BLOCKS * VALUE // 2, "of the second one all"
