"""Host memory beside the device is never over its cap: training works within the smallest that is named, and any larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capped_run import Run
from capped_stack import named_by
from marks import more
from torch import nn
from torch.nn import functional

import zinf_compile
from zinf_compile.errors import BudgetError

SIZES = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB"}

HOMES = {
    "parameters and states on a drive": {"params": "nvme", "grads": "host", "optimizer": "nvme"},
    "parameters on a drive": {"params": "nvme", "grads": "host", "optimizer": "host"},
    "states on a drive": {"params": "host", "grads": "host", "optimizer": "nvme"},
    "gradients on a drive": {"params": "host", "grads": "nvme", "optimizer": "nvme"},
}


def trained(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the parameters after three steps of two micro-batches, and the most host memory that was held meanwhile."""
    run = Run("wide", options)
    for _ in range(3):
        run.step()
    zinf_compile.synchronize()
    memory = next(run.model.parameters())._zinf_unit.context.memory  # type: ignore[union-attr]
    return zinf_compile.full_state_dict(run.model), memory.host_ledger.total()[1]


@pytest.mark.parametrize("homes", HOMES)
def test_any_cap_works_from_the_one_that_is_named(homes: str, tmp_path: Path) -> None:
    """Copies of the forward may still read host memory when the backward asks for more: it waits for them, and is not refused."""
    options = {**SIZES, **HOMES[homes], "nvme": str(tmp_path)}
    expected, most = trained(options)
    with pytest.raises(BudgetError, match="bytes of host memory") as refused:
        trained({**options, "host_memory": 1})
    least = named_by(str(refused.value), "host_memory")
    with pytest.raises(BudgetError):
        trained({**options, "host_memory": least - 1})
    for cap in (least, least + (1 << 16), 3 * least // 2, 2 * least, 5 * least):
        values, peak = trained({**options, "host_memory": cap})
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}; {most:,} without one"
        for name, value in values.items():
            assert torch.equal(value, expected[name]), f"{name} under a cap of {cap:,}"


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.heads, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Blocks between an embedding and logits by the same weight."""

    def __init__(self, blocks: int, width: int = 50, count: int = 1003) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(count, width), nn.ModuleList(Block(width, 202) for _ in range(blocks))
        self.head = nn.Linear(width, count, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train_words(folder: Path, blocks: int, **caps: int) -> None:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Words(blocks).to("late")
    model.compile(backend="zero_infinity", options={"compute": "fx", "nvme": str(folder), **caps})
    optimizer, tokens = torch.optim.Adam(model.parameters(), foreach=False), torch.arange(120).view(3, 40).to("late")
    for _ in range(2):
        model(tokens, tokens.flip(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()


@pytest.mark.parametrize(("blocks", "host"), [(1, 600 << 10), more(1, 1 << 20), more(4, 600 << 10), (4, 2 << 20)])
def test_caps_of_both_sides_that_a_refusal_names_work_together(blocks: int, host: int, tmp_path: Path) -> None:
    """Other homes are chosen within the larger ones, which may need more of the other side."""
    caps = {"device_memory": 100 << 10, "host_memory": host}
    with pytest.raises(BudgetError) as refused:
        train_words(tmp_path, blocks, **caps)
    text = str(refused.value)
    del refused  # which holds the model
    caps["device_memory"] = named_by(text)
    if "host_memory that works" in text:
        caps["host_memory"] = named_by(text, "host_memory")
    train_words(tmp_path, blocks, **caps)
