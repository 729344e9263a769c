"""Gradients in tiles where a parameter is used through what is derived from it: chunks, views, scaled rows, single experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import BACKEND


def grads_of(build: Callable[[], nn.Module], *inputs: torch.Tensor, dynamic: bool | None = None, **options: object) -> None:
    """Hold that loss and gradients are those of eager PyTorch, within rounding."""
    torch.manual_seed(3)
    eager = build()
    ours = torch.compile(copy.deepcopy(eager), backend=BACKEND, options=options, dynamic=dynamic)
    losses = [model(*inputs) for model in (eager, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        bound = 256 * 2**-24 * one.grad.abs().max().item()
        assert (other.grad.full_tensor() - one.grad).abs().max() <= bound, name


class Calls(nn.Module):
    """Calls `function(w, x)`."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(*shape)), function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.w, *inputs).sum()


X, COLUMN = torch.randn(5, 8), torch.rand(24, 1) + 0.5


def shared_gradient(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a, b, c = w.chunk(3)
    return F.linear(x, a + b) + 2 * F.linear(x * x, c)


FOUND: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], int]] = {
    "two chunks have one gradient": (shared_gradient, (24, 8), 256),
    "a column is broadcast": (lambda w, x: F.linear(x, w * COLUMN), (24, 8), 256),
    "a column is broadcast over single rows": (lambda w, x: F.linear(x, w * COLUMN), (24, 8), 32),
    "one of some experts": (lambda w, x: x @ w[2:6][3], (6, 8, 8), 512),
    "one of two experts": (lambda w, x: x @ w[2:4][1] + x @ w[0:4][-1], (6, 8, 8), 256),
    "no experts": (lambda w, x: x @ w[1] + w[6:6].sum(), (6, 8, 8), 256),
}


@pytest.mark.parametrize("case", FOUND)
def test_gradients_through_what_is_derived(case: str) -> None:
    function, shape, tile = FOUND[case]
    grads_of(lambda: Calls(function, *shape), X, tile=tile)


def test_sizes_and_indices_that_are_known_at_run_time() -> None:
    grads_of(lambda: Calls(lambda w, x: F.linear(x, w / x.shape[0]), 24, 8), X, dynamic=True, tile=256)


def test_an_embedding_scaled_by_frequency() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(16, 8, scale_grad_by_freq=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.words(words).square().sum()

    grads_of(Scaled, torch.tensor([1, 1, 1, 9, 9, 3]), tile=256)


def test_a_tile_of_a_head_whose_classes_are_impossible() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 32)
            with torch.no_grad():
                self.head.bias[:8] = -torch.inf

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), torch.tensor([8, 20, 31, 9, 14]))

    grads_of(Masked, X, tile=256, chunk_loss=True)
