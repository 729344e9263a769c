"""The model of the checkpoints in tests/fixtures/deepspeed, and what DeepSpeed says is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from paths import ROOT
from safetensors.torch import load_file
from torch import nn

FOLDER = ROOT / "tests" / "fixtures" / "deepspeed"
CASES = [f"stage{stage}-{dtype}" for stage in (1, 2, 3) for dtype in ("bf16", "fp16")] + ["universal1", "universal3"]


def build() -> nn.Module:
    """Return the model, from the script that has written the checkpoints."""
    path = FOLDER / "write.py"
    spec = importlib.util.spec_from_file_location("deepspeed_write", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build()
    assert isinstance(model, nn.Module)
    return model


def adamw(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer, in its two groups, with other settings."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]
    return torch.optim.AdamW([{"params": group} for group in groups], lr=0.5, weight_decay=0.5, fused=fused)


def expected(case: str) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed says is in a checkpoint: `fp32.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`."""
    return load_file(Path(FOLDER) / case / "expected.safetensors")
