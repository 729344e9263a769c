"""A model whose forward computes from its parameters in eager code while it trains: transposes, slices, products of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from training import BACKEND

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

ROWS, WIDTH, STEPS = 4, 6, 3


class Signs(torch.autograd.Function):
    """Signs of weights, with the gradient of the weights themselves, as trained binary networks use."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Products(torch.autograd.Function):
    """Products with a weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        result: torch.Tensor = (grad + grad.t()) @ weight
        return result


class Sums(torch.autograd.Function):
    """Squares of sums of weights' rows, by a `forward` that is given no context."""

    @staticmethod
    def forward(weight: torch.Tensor) -> torch.Tensor:
        return weight.cumsum(0).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return (2 * weight.cumsum(0) * grad).flip(0).cumsum(0).flip(0)


class Rounded(torch.autograd.Function):
    """Sums of weights' rows, with PyTorch's decorator for mixed precision above them."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float64)
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.cumsum(0)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flip(0).cumsum(0).flip(0)


class Expressions(nn.Module):
    """Layers that a loop with a draw keeps from being compiled, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        loss: torch.Tensor = self.out(self.inner(self.head(x))).square().mean()
        return loss


class Inner(nn.Module):
    """Uses of a parameter that need whole values, some of them behind others that don't.

    `besides`: a function of a parameter that each forward of training calls; None: none.
    """

    besides: Callable[[nn.Parameter], object] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.beside, self.long = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(2 * ROWS + 1, WIDTH))
        self.scale = nn.Parameter(torch.rand(ROWS, WIDTH), requires_grad=False)
        self.signs = nn.Parameter(torch.randn(WIDTH, WIDTH))  # all of its gradient comes from a custom function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of x's shape."""
        for _ in range(2):
            draw = torch.rand([])
            if self.training and draw > 2:
                continue
            if self.training and self.besides is not None:
                self.besides(self.long)
            x = x + self.beside  # of the activation's own shape
            x = x * (self.scale * 2) + self.long[1 : ROWS + 1]
            x = x @ self.weight.t() + x @ (self.weight * 0.5)
            x = F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True))
            x = x * self.beside.exp() + (self.weight + self.weight.T).softmax(0)[:ROWS]
            x = F.layer_norm(x, (WIDTH,))  # so that no tanh is flat
            gate = x[:, 0].mean().sigmoid()  # each rank's own
            x = x @ (self.weight * gate) + torch.where(x[0, 0] > 0, self.beside, self.beside * (1 - gate))
            most = x.detach().abs().max().item() if self.training else 1.0  # an evaluation is captured whole
            if self.training:  # Dynamo, which captures an evaluation, warns of custom functions
                x = x @ (Products.apply(self.weight * most) + Products.apply(self.weight)) + x @ Sums.apply(self.weight)
                x = x @ Rounded.apply(self.weight) + most * x @ (Signs.apply(self.weight) + Signs.apply(self.signs))
            x = F.layer_norm(x @ (self.weight * most) + self.beside.square().sum() * x, (WIDTH,))
            made = torch.full_like(self.beside, most)
            made += torch.zeros_like(self.beside).add_(x.detach())
            x = x * made.tanh() + (x @ self.scale.t()) @ self.scale
            changed = x.detach().clone()
            changed += self.scale
            changed.multiply_(self.beside)
            x = torch.tanh(F.layer_norm(x, (WIDTH,)) + changed.mul_(self.scale) + F.softplus(self.weight)[:ROWS])
        return x


def trained(world: int, rank: int, options: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor]]:
    """Train on one batch a rank, after an evaluation, which captures all of the model; return losses and, on rank 0, values.

    `options`: None trains eager PyTorch on the mean of all ranks' losses. Losses are those of `rank`.
    """
    torch.manual_seed(0)
    model = Expressions().double()  # many operators amplify how sums are rounded
    if options is not None:
        model.compile(backend=BACKEND, options=options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.eval()
    with torch.no_grad():
        model(_batch(0, rank))
    model.train()
    losses = []
    for step in range(STEPS):
        if options is not None:
            loss = own = model(_batch(step, rank))
        else:
            each = torch.stack([model(_batch(step, other)) for other in range(world)])
            loss, own = each.mean(), each[rank]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(own.item())
    with torch.no_grad():
        losses.append(model(_batch(STEPS, rank)).item())
    assert options is None or all(isinstance(p, ShardedParameter) for p in model.parameters())
    return losses, list(zinf_compile.full_state_dict(model).values())


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
