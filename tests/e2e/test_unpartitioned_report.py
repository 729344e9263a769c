"""What the first step says of parameters that no compiled graph uses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from training import BACKEND, adamw


class Adapted(nn.Module):
    """A frozen layer, a small one that is trained, and a parameter that nothing uses."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(64, 64, bias=False).requires_grad_(False), nn.Linear(64, 4, bias=False)
        self.unused = nn.Parameter(torch.zeros(unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.frozen(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("unused", "share", "level"), [(128, "3%", logging.INFO), (1088, "20%", logging.WARNING)])
def test_the_share_is_of_all_parameters_frozen_ones_too(
    unused: int, share: str, level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zinf_compile")
    model, homes = Adapted(unused), dict.fromkeys(("params", "grads", "optimizer"), "nvme")
    model.compile(backend=BACKEND, options={**homes, "nvme": str(tmp_path)})
    optimizer = adamw([model.adapter.weight])
    model(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    (said,) = [record for record in caplog.records if record.getMessage().startswith("no compiled graph uses")]
    assert f"{share} of the model" in said.getMessage()
    assert said.levelno == level
