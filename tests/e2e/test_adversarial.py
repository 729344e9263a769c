"""Two models that train each other: what the generator saved waits while the discriminator takes its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import BACKEND, assert_same, whole_gradient

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ROWS, WIDTH = 512, 32


class Net(nn.Module):
    """Three blocks with dropout, and statistics that the forward changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))
            for width in (inputs, WIDTH, WIDTH)
        ]
        self.layers = nn.Sequential(*blocks, nn.Linear(WIDTH, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def train(options: dict[str, Any] | None) -> dict[str, torch.Tensor | None]:
    """Take three steps of both; return losses, parameters, buffers, and the state of the random generator."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    generator, discriminator = Net(8, WIDTH), Net(WIDTH, 1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (generator, discriminator)]
    if options is not None:
        for model in (generator, discriminator):
            model.compile(backend=BACKEND, options={"compute": "fx", **options})
    found: dict[str, torch.Tensor | None] = {}
    for number in range(3):
        real, noise = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8)
        fake = generator(noise)  # its backward comes after the discriminator's step
        optimizers[1].zero_grad()
        judged = nn.functional.softplus(-discriminator(real)) + nn.functional.softplus(discriminator(fake.detach()))
        judged.mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = nn.functional.softplus(-discriminator(fake)).mean()
        loss.backward()
        optimizers[0].step()
        found |= {f"discriminator's loss {number}": judged.detach().mean(), f"generator's loss {number}": loss.detach()}
    zinf_compile.synchronize()
    for name, model in (("generator", generator), ("discriminator", discriminator)):
        if options is not None:
            assert all(isinstance(p, ShardedParameter) for p in model.parameters())
        values = zinf_compile.full_state_dict(model) if options is not None else model.state_dict()
        found |= {f"{name}'s {key}": value.clone() for key, value in values.items()}
        found |= {f"gradient of {name}'s {key}": whole_gradient(p) for key, p in model.named_parameters()}
    return found | {"random numbers": torch.get_rng_state()}


@pytest.fixture(scope="module")
def of_eager() -> dict[str, torch.Tensor | None]:
    return train(None)


@pytest.mark.parametrize("word", ["keep", "nvme", "recompute"])
def test_it_is_eagers(word: str, of_eager: dict[str, torch.Tensor | None], tmp_path: Path) -> None:
    found = train({"activations": word, **({"nvme": str(tmp_path)} if word == "nvme" else {})})
    assert found.keys() == of_eager.keys()
    for name, value in of_eager.items():
        assert_same(name, value, found[name])
