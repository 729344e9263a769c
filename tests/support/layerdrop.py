"""A model whose forward Dynamo leaves to eager code while it trains: draws in a loop decide which layers run, as in wav2vec2."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import BACKEND


class Layer(nn.Module):
    """A residual layer, whose output is scaled as LayerScale and RMSNorm do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and its layer's output added up."""
        out: torch.Tensor = x + self.gain * self.up(x).relu()
        return out


class Encoder(nn.Module):
    """Layers, some of which are skipped while it trains.

    `reentrant`: the way in which they are computed again for the backward; None: they are not.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers that are drawn, as the models of transformers do."""
        x = torch.nn.functional.linear(self.norm(x), torch.diag(self.scale))
        for layer in self.layers:
            draw = torch.rand([])
            if self.training and draw < 0.3:
                continue
            again = self.training and self.reentrant is not None
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if again else layer(x)
        return x


class Model(nn.Module):
    """An encoder between two layers that are compiled."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.head, self.encoder, self.out = nn.Linear(8, 16), Encoder(reentrant), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        loss: torch.Tensor = self.out(self.encoder(self.head(x))).square().mean()
        return loss


def trained(
    options: dict[str, Any] | None, *, evaluate: bool, draws: int = 0, reentrant: bool | None = None
) -> tuple[list[float], nn.Module]:
    """Train for four steps, with an evaluation behind the second, which captures the whole model; return losses and model.

    `options`: None trains by eager PyTorch. `draws`: added to the seeds of the draws.
    """
    torch.manual_seed(0)
    model = Model(reentrant)
    if options is not None:
        model.compile(backend=BACKEND, options=options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True)
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step + draws)
        model.train()
        loss = model(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluate and step == 1:
            model.eval()
            with torch.no_grad():
                model(x)
    return losses, model


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of its parameters' values."""
    return [copy.deepcopy(p.detach()) for p in model.parameters()]
