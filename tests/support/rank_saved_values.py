"""Training with each saved value at a place of its own, drawn from a seed, beside training that keeps them all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from models import Case
from tiers import context_of
from torch import fx, nn
from training import adamw
from transformer_models import TRANSFORMERS

import zinf_compile
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.errors import StoreError
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


def train_mixed(
    rank: int, size: int, folder: str, names: Sequence[str], dtype: torch.dtype, compute: str, apart: bool, seeds: Sequence[int]
) -> int:
    """Train each case under each seed, two micro-batches in flight; return the number of memories that moved."""
    torch._dynamo.config.recompile_limit = 64
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
