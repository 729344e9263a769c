"""An eager model and its compiled twin, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from optimizers import assert_same_states
from torch import nn
from torch.optim import Optimizer
from training import MakeOptimizer, Step, adamw, assert_same, in_place, plain_step, train_step_on, twins

import zinf_compile
from zinf_compile.sharded.tensor import ShardedTensor


class Twins:
    """Two equal models, eager and compiled, each with its optimizer; what is done to one is done to the other."""

    def __init__(
        self, build: Callable[[], nn.Module], compiled: Callable[[nn.Module], Any] = in_place, make: MakeOptimizer = adamw
    ) -> None:
        self.eager: Any
        self.ours: Any
        self.eager, self.ours = twins(build)
        self.call = compiled(self.ours)
        self.optimizers = [make(model.parameters()) for model in self.models]

    @property
    def models(self) -> tuple[Any, Any]:
        """The eager model and its twin."""
        return self.eager, self.ours

    @property
    def sides(self) -> list[tuple[Any, Optimizer]]:
        """What is called, and its optimizer; eager first."""
        return list(zip((self.eager, self.call), self.optimizers, strict=True))

    def step(self, batch: tuple[Any, ...], number: int = 0, step: Step = plain_step) -> None:
        """Take a step with both; compare loss, parameters, gradients and buffers."""
        train_step_on(self.sides, self.models, step, batch, number)

    def each(self, act: Callable[[Any, Any], Any], beside: Sequence[Any] | None = None) -> None:
        """Do it with both and compare what comes out, then all; `beside` is given in place of the optimizers."""
        results = []
        for model, other in zip((self.eager, self.call), beside or self.optimizers, strict=True):
            torch.manual_seed(1)
            results.append(act(model, other))
        expected, found = results
        if isinstance(expected, torch.Tensor):
            assert_same("result", whole(expected), whole(found))
        else:
            assert expected == found
        self.compare()

    def compare(self) -> None:
        """Compare parameters, buffers and optimizer states."""
        state = zinf_compile.full_state_dict(self.ours)
        for name, value in self.eager.state_dict().items():
            assert_same(name, value, state[name])
        assert_same_states(*self.optimizers)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return what is partitioned whole, anything else as it is."""
    return value.full_tensor() if isinstance(value, ShardedTensor) else value.detach()
