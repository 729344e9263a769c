"""Nets as Lightning trains them. Lightning comes from the fixture of that name, which knows what importing it does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training import adamw


def net_type(lightning: Any) -> Any:
    """Return the class of modules of a net that computes its own loss, trained by AdamW."""

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters())

    return Module
