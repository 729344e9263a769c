"""Training with a home of its own for each parameter and kind of state, drawn from a seed, on one rank or several."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rank_tiers import Build, Run, _check, _prepare, _train
from tiers import Meter, sundry, train_step
from torch import fx, nn
from training import BACKEND, assert_same

import zinf_compile
from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import TIERS, Tier
from zinf_compile.runtime.context import context_for
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.partition import partition

Home = tuple[Tier, Tier, Tier]
"""Of a parameter, its gradient, its states."""


def drawn_homes(seed: int, *, apart: bool) -> Callable[[str], Home]:
    """Return homes by a parameter's name, the same on all ranks."""
    tiers = TIERS if apart else (Tier.DEVICE, Tier.NVME)

    def home(name: str) -> Home:
        numbers = random.Random(f"{seed} {name}")
        return numbers.choice(tiers), numbers.choice(tiers), numbers.choice(tiers)

    return home


class Mixed(GraphCompiler):
    """Places each parameter that isn't partitioned yet by its name."""

    def __init__(self, config: Config, home: Callable[[str], Home], given: Sequence[str]) -> None:
        super().__init__(config, given=given)
        self._home = home

    def place(self, slots: Sequence[ParameterSlot], inputs: Sequence[Any]) -> Placements:
        placed = super().place(slots, inputs)
        own = dict(placed.own)
        for slot in slots:
            params, grads, optimizer = self._home(slot.name)
            home = dataclasses.replace(placed.rest, params=params, grads=grads, optimizer=optimizer)
            own.setdefault(slot.index, home)
        return Placements(placed.rest, own)


def mixed(options: Mapping[str, Any], home: Callable[[str], Home]) -> Callable[..., Compiled]:
    """Return a backend."""
    config = Config.from_options({**options, "params": "nvme"})

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return Mixed(config, home, ()).compile(gm, inputs)

    return backend


def train_at_homes(options: Mapping[str, Any], home: Callable[[str], Home], dtype: torch.dtype, build: Build, rank: int) -> Run:
    """Train for three steps, an evaluation in between; save and load the states once."""
    torch.compiler.reset()
    model = build(dtype)
    model.compile(backend=mixed(options, home))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    losses: list[float] = []
    for step in range(3):
        losses += train_step(model, optimizer, step, rank)
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
            zinf_compile.load_full_state_dict(model, zinf_compile.full_state_dict(model))
    return losses, zinf_compile.full_state_dict(model), optimizer.state_dict()["state"]


class Block(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Alike(nn.Module):
    """Blocks that share one compiled graph, whichever parameters it is called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.width = width

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = words.to(self.blocks[0].up.weight.dtype).repeat(1, self.width // 8) / 23
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def alike(dtype: torch.dtype) -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(5)
    return Alike(16).to(dtype)


def broad(dtype: torch.dtype) -> nn.Module:
    """Return one of which a part may live near."""
    torch.manual_seed(5)
    return Alike(64).to(dtype)


def train_strays(rank: int, size: int, folder: str, homes: Sequence[tuple[str, str, str]], apart: bool, tile: int | None) -> int:
    """Train blocks that share a graph, which was compiled for homes that most of them don't have; check the bits."""
    _prepare()
    others: dict[str, Any] = {"bucket": 300, "tile": tile}
    runs = []
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        for placed in ([("device", "device", "device")] * 4, homes):
            torch.compiler.reset()
            model = alike(torch.float32)
            with torch.no_grad():
                partition_at(model, [home for home in placed for _ in range(4)], {**others, "params": "nvme", "nvme": folder})
            for block in model.blocks:
                block.compile(backend=BACKEND, options=others)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            losses = [loss for step in range(3) for loss in train_step(model, optimizer, step, rank)]
            runs.append((losses, zinf_compile.full_state_dict(model), optimizer.state_dict()["state"]))
    _check(("strays", "", ""), None, runs[1], runs[0])
    return len(homes)


def partition_at(model: nn.Module, homes: Sequence[tuple[str, str, str]], options: Mapping[str, Any]) -> None:
    """Partition the parameters, each at its home."""
    config = Config.from_options(options)
    device = next(model.parameters()).device
    context = context_for(config.resolve_group(), device, timeout_s=config.timeout_s, signature=config.signature())
    named = [(parameter, name) for name, parameter in model.named_parameters()]
    placements = [dataclasses.replace(config.placement(), params=Tier(p), grads=Tier(g), optimizer=Tier(o)) for p, g, o in homes]
    partition(dict(enumerate(named)), context, placements.__getitem__, called=False)


def train_mixtures(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    seeds: Sequence[int],
    apart: bool,
    *,
    build: Build = sundry,
    given: dict[str, Any] | None = None,
) -> int:
    """Train with the homes of each seed; raises where one has other bits than all on the device. Returns their number."""
    _prepare()
    others = {"compute": "fx", "bucket": 300, "compute_shape": {"piece_numel": 96}, **(given or {})}
    expected = _train(rank, others, Meter(None), None, dtype, 3, build)
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        for seed in seeds:
            home = drawn_homes(seed, apart=apart)
            found = train_at_homes({**others, "nvme": folder}, home, dtype, build, rank)
            _check(("mixed", str(seed), ""), None, found, expected)
    return len(seeds)


def train_within(rank: int, size: int, folder: str, caps: Sequence[int], given: Mapping[str, Any]) -> list[int]:
    """Train under caps with homes that follow from them; check bits and peaks; return how many homes each cap has made."""
    _prepare()
    others = {"compute": "fx", "bucket": 300, "compute_shape": {"piece_numel": 96}, "tile": 1 << 20, **given}
    expected = _train(rank, others, Meter(None), None, torch.float32, 2, broad)
    found = []
    for cap in caps:
        torch.compiler.reset()
        zinf_compile.reset()  # graphs of the model before, and what they have reserved
        model = broad(torch.float32)
        model.compile(backend=BACKEND, options={**others, "nvme": folder, "device_memory": cap})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
        losses = [loss for step in range(2) for loss in train_step(model, optimizer, step, rank)]
        assert losses == expected[0]
        for name, value in zinf_compile.full_state_dict(model).items():
            assert_same(name, expected[1][name], value)
        assert zinf_compile.stats(model)["memory"]["device"]["peak_last_step"]["all"] <= cap
        units = [p._zinf_unit for p in model.parameters() if isinstance(p, ShardedParameter) and p.requires_grad]
        found.append(len({(u.placement.params, u.placement.grads, u.placement.optimizer) for u in units}))
    return found
