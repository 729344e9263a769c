"""Train beside eager within rounding: what compiled regions are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from models import loss_of
from torch import nn
from training import whole_gradient

RELATIVE = 1e-5
"""Of a tensor's largest element: one operator's rounding in fp32, no more."""


def assert_near(what: str, found: torch.Tensor | None, expected: torch.Tensor | None, *, scale: float | None = None) -> None:
    """Require the same form, and values within `RELATIVE` of the largest one, or of `scale`; or two times None."""
    if found is None or expected is None:
        assert found is expected, f"{what}: expected {expected}, found {found}"
        return
    found, expected = found.detach(), expected.detach()
    scale = _largest(expected) if scale is None else scale
    torch.testing.assert_close(found, expected, rtol=0, atol=RELATIVE * scale, msg=lambda text: f"{what}: {text}")


def assert_gradients_near(model: nn.Module, expected: Mapping[str, torch.Tensor | None], when: str) -> None:
    """Compare gradients by name, within `RELATIVE` of the largest one of their module: a bias before a normalisation has none."""
    scales: dict[str, float] = {}
    for name, grad in expected.items():
        owner = name.rpartition(".")[0]
        scales[owner] = max(scales.get(owner, 0.0), 0.0 if grad is None else _largest(grad))
    for name, parameter in model.named_parameters():
        scale = scales[name.rpartition(".")[0]]
        assert_near(f"gradient of {name}, {when}", whole_gradient(parameter), expected[name], scale=scale)


def train_near_eager(
    build: Callable[[], nn.Module],
    batches: Iterable[tuple[Any, ...]],
    *,
    dynamic: bool | None = None,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train twins with SGD on `batches`; compare losses, gradients, parameters and buffers after each step."""
    torch.manual_seed(7)
    eager = build()
    ours = copy.deepcopy(eager)
    ours.compile(backend="zero_infinity", dynamic=dynamic, options={"compute": "inductor", **options})
    sides = [(model, torch.optim.SGD(model.parameters(), lr=0.05)) for model in (eager, ours)]
    for number, batch in enumerate(batches):
        losses = []
        for model, optimizer in sides:
            torch.manual_seed(number)
            optimizer.zero_grad()
            losses.append(loss_of(model(*batch)))
            losses[-1].backward()
        assert_near(f"loss of step {number}", losses[1], losses[0])
        assert_gradients_near(ours, {name: p.grad for name, p in eager.named_parameters()}, f"step {number}")
        for _, optimizer in sides:
            optimizer.step()
        for (name, expected), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert_near(f"{name}, step {number}", found.detach(), expected)
        for (name, expected), found in zip(eager.named_buffers(), ours.buffers(), strict=True):
            assert_near(f"buffer {name}, step {number}", found, expected)
    return eager, ours


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
