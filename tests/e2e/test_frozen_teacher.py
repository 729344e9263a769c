"""A frozen model that runs before the one that is trained leaves room for the chunks of its optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from named_cap import named_cap
from tiers import options_for
from torch import nn
from training import BACKEND

from zinf_compile.errors import BudgetError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

WIDTH = 32


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _distil(folder: Path, cap: int, dtype: torch.dtype) -> float:
    torch.compiler.reset()
    torch.manual_seed(0)
    teacher, student = _Model().requires_grad_(False).to(dtype), _Model()
    for model in (teacher, student):
        model.compile(backend=BACKEND, options={**options_for(("nvme",) * 3, folder), "device_memory": cap})
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            expected = teacher(x.to(dtype)).float()
        loss = (student(x) - expected).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_trains_within_caps_above_the_one_that_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    """The first step was refused: the teacher's reads ran ahead into all room that its own graph left."""
    with pytest.raises(BudgetError) as refused:
        _distil(tmp_path, 1 << 15, dtype)
    least = named_cap(refused.value)
    assert len({_distil(tmp_path, cap, dtype) for cap in (least + least // 8, 2 * least)}) == 1
