"""Training on several ranks whose shards stay on the device between forward and backward, as cases of `run_ranks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_kept_units import same_state
from tiers import context_of
from torch import nn
from torch.nn import functional as F
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.backend.replan import FIRST, MEASURED
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

WORDS, WIDTH = 37, 24
STEPS = FIRST + MEASURED + 2


class Words(nn.Module):
    """Layers of sizes that no number of ranks divides, one that is used twice, and a head that may be the embedding."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.twice(self.embedding(tokens)))
        found: torch.Tensor = self.head(torch.tanh(self.twice(torch.relu(self.inner(x)))))
        return found


class Trained(NamedTuple):
    """What became of a model, and what went over links."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    left: int
    """Bytes that a forward has left on the device."""
    crossed: int
    """Bytes that came to the device, or from the drive where that is the host, in the last step."""


class Case:
    """A model on one rank, trained on batches of its own."""

    def __init__(self, rank: int, options: dict[str, Any], *, tied: bool = False) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(3)
        self.rank, self.model = rank, Words(tied=tied)
        self.call: Any = torch.compile(self.model, backend=BACKEND, options={"bucket": 512, "timeout_s": 60, **options})
        self.optimizer = adamw(self.model.parameters())

    @property
    def context(self) -> Context:
        return context_of(self.model)

    def loss(self, step: int) -> torch.Tensor:
        tokens = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(100 * step + self.rank))
        return F.cross_entropy(self.call(tokens).flatten(0, 1), tokens.flatten())

    def train(self, between: Callable[[int], object] = lambda step: None) -> Trained:
        losses, left = [], 0
        for step in range(STEPS):
            for part in range(2):
                loss = self.loss(2 * step + part)
                left = self.context.full_copies.handed_on_bytes
                between(step)
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        links = zinf_compile.stats(self.model)["links"]
        crossed = max(links[name]["bytes_last_step"] for name in links if name in ("host to device", "nvme to host"))
        return Trained(losses, zinf_compile.full_state_dict(self.model), left, crossed)


def leaves_shards(rank: int, size: int, options: dict[str, Any], apart: bool, tied: bool) -> tuple[int, int, int, int]:
    """Train with shards that stay and without; return what a forward leaves, the bytes of shards, and what both bring a step."""
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        plain = Case(rank, options | {"planner": "one_ahead"}, tied=tied).train()
        case = Case(rank, options | {"planner": "greedy"}, tied=tied)
        found = case.train()
        shards = sum(p._zinf_unit.shard_numel * 4 for p in case.model.parameters())  # type: ignore[attr-defined]
    assert plain.losses == found.losses
    assert same_state(found.state, plain.state)
    assert plain.left == 0
    return found.left, shards, plain.crossed, found.crossed


def with_others_in_between(rank: int, size: int, options: dict[str, Any]) -> list[int]:
    """Run what lets shards go between forward and backward: another model, an evaluation, a step; check the bits.

    Returns what was left behind each.
    """
    with simulating(SimulatedDevice()):
        expected = Case(rank, options | {"planner": "one_ahead"}).train()
        found = []
        for other in (_evaluate, _another_model):
            case = Case(rank, options | {"planner": "cached_prefetch"})
            act, left = other(case), []

            def between(step: int, act: Any = act, left: list[int] = left, case: Case = case) -> None:
                act(step)
                left.append(case.context.full_copies.handed_on_bytes)

            trained = case.train(between)
            assert trained.left > 0
            assert trained.losses == expected.losses
            assert same_state(trained.state, expected.state)
            found.append(left[-1])
        case = Case(rank, options | {"planner": "cached_prefetch"})
        case.train()
        loss = case.loss(0)
        loss.backward()
        case.loss(1)
        assert case.context.full_copies.handed_on_bytes
        case.optimizer.step()
        zinf_compile.synchronize()
        found.append(case.context.full_copies.handed_on_bytes)
        dist.barrier()
    return found


def _evaluate(case: Case) -> Callable[[int], object]:
    def act(step: int) -> None:
        with torch.no_grad():
            case.loss(step)

    return act


def _another_model(case: Case) -> Callable[[int], object]:
    torch.manual_seed(4)
    model = nn.Linear(WIDTH, WIDTH)
    call = torch.compile(model, backend=BACKEND, options={"bucket": 512, "timeout_s": 60, "params": "host"})
    return lambda step: call(torch.ones(2, WIDTH) * step).sum().backward()
