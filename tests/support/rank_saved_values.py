"""Training with each saved value at a place of its own, drawn from a seed, beside training that keeps them all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from compute_models import Stretches
from models import Case
from named_cap import named_cap
from tiers import context_of
from torch import fx, nn
from training import adamw
from transformer_models import TRANSFORMERS

import zinf_compile
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.errors import BudgetError, StoreError
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.storage.value_space import ValueSpace

PLACES = (Tier.DEVICE, Tier.HOST, Tier.NVME)


class Mixed(GraphCompiler):
    """Draws a place for each saved memory, small ones too; without a seed all are kept."""

    seed: int | None = None
    moved = 0

    def choose_homes(self, memories: Sequence[SavedMemory]) -> tuple[SavedMemory, ...]:
        if self.seed is None:
            return ()
        numbers = random.Random(f"{self.seed} {self.number}")
        placed = [dataclasses.replace(memory, tier=numbers.choice(PLACES)) for memory in memories if memory.bytes]
        chosen = tuple(memory for memory in placed if self.topology.is_offloaded(memory.tier))
        Mixed.moved += len(chosen)
        return chosen


def mixing(options: Mapping[str, Any], seed: int) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Return a backend under which each graph draws whether its blocks run again, and a place for each saved memory."""
    numbers = random.Random(seed)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        word = numbers.choice(("nvme", "recompute"))
        compiler = Mixed(Config.from_options({**options, "activations": word}), given=tuple(options))
        compiler.seed = numbers.randrange(1 << 30)
        return compiler.compile(gm, inputs)

    return backend


def train_mixed(
    rank: int, size: int, folder: str, names: Sequence[str], dtype: torch.dtype, compute: str, apart: bool, seeds: Sequence[int]
) -> int:
    """Train each case under each seed, two micro-batches in flight; return the number of memories that moved."""
    torch._dynamo.config.recompile_limit = 64
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # of transformers' experts
    if dtype == torch.bfloat16:
        warnings.filterwarnings("ignore", "all .* parameters are torch.bfloat16 and updated in that precision")
    Mixed.moved = 0
    for name in names:
        expected = _train(TRANSFORMERS[name], rank, folder, dtype, compute, apart, None)
        for seed in seeds:
            for word in ("nvme", "recompute"):  # with the second, what blocks are made again from moves
                found = _train(TRANSFORMERS[name], rank, folder, dtype, compute, apart, seed, word)
                assert len(found) == len(expected)
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), (name, seed, word)
    return Mixed.moved


def run_out_of_space(rank: int, size: int, folder: str) -> str:
    """Have the last rank's drive full at its second forward; return the error of this one, and train on."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    options = {"compute": "fx", "activations": "nvme", "nvme": folder}
    call: Any = torch.compile(model, backend="zero_infinity", options=options)
    x = torch.randn(512, 64)
    first = call(x)
    full = StoreError(errno.ENOSPC, "the drive is full", folder)
    with mock.patch.object(ValueSpace, "reserve", side_effect=full if rank == size - 1 else None):
        try:
            call(x)
        except StoreError as error:
            found = str(error)
    first.sum().backward()
    call(x).sum().backward()
    return found


def train_within_caps(rank: int, size: int, folder: str, free: bool) -> list[dict[str, int]]:
    """Train with batches that differ from rank to rank under caps between the least and all kept; return what was decided.

    `free`: homes of parameters are decided as well. Losses and parameters are those of keeping.
    """
    words = {} if free else dict.fromkeys(("params", "grads", "optimizer"), "device")
    drive = {**words, "nvme": folder, "bucket": "16KiB"}
    kept = _least(rank, {**(drive if free else {**words, "bucket": "16KiB"}), "activations": "keep"})
    least = _least(rank, drive)
    assert least < kept, "all ranks are told one number"
    expected, _ = _within(rank, {"bucket": "16KiB"})
    decided = []
    for cap in (least, (least + kept) // 2, kept):
        found, saved = _within(rank, {**drive, "device_memory": cap})
        assert all(map(torch.equal, found, expected)), cap
        decided.append(saved)
    assert _least(rank, drive, cap=least - 1) == least
    return decided


def _within(rank: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, int]]:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(5)
    model = Stretches()
    model.compile(backend="zero_infinity", options={"compute": "fx", **options})
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(2):
        for part in range(2):
            batch = torch.randn(4096 // (1 + rank), 64, generator=torch.Generator().manual_seed(10 * step + part + rank))
            loss: torch.Tensor = model(batch)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    memory = zinf_compile.stats(model)["memory"]["device"]["peak"]["all"]
    assert memory <= options.get("device_memory", memory)
    return [*losses, *zinf_compile.full_state_dict(model).values()], zinf_compile.stats(model)["activations"]


def _least(rank: int, options: dict[str, Any], cap: int = 1) -> int:
    with pytest.raises(BudgetError) as refused:
        _within(rank, {**options, "device_memory": cap})
    return named_cap(refused.value)


def _train(
    case: Case, rank: int, folder: str, dtype: torch.dtype, compute: str, apart: bool, seed: int | None, word: str = "nvme"
) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(5)
    model = case.build().to(dtype).train()
    config = Config.from_options({"compute": compute, "activations": word, "nvme": folder})

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiler = Mixed(config)
        compiler.seed = seed
        return compiler.compile(gm, inputs)

    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        call: Any = torch.compile(model, backend=backend)
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(2):
            torch.manual_seed(100 + step)  # equal on all ranks: dropout is not what is tested here
            found = [call(*case.batch(2 * step + part, rank)) for part in range(2)]
            for loss in found:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.detach() for loss in found]
        values = zinf_compile.full_state_dict(model)
    del found, loss
    assert all(space.bytes == 0 for space in context_of(model)._value_spaces.values())
    return [*losses, *values.values(), torch.rand(1)]
