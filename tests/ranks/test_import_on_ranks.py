"""Checkpoints of DeepSpeed on other numbers of ranks, with masters and moments in memory or on drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_model import FOLDER, build, expected
from rank_checkpoint import saved
from rank_import import imported, refused, renamed
from ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("case", "size", "places"),
    [
        ("stage3-bf16", 3, {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "tile": 64}),
        ("stage2-fp16", 2, {}),
        ("universal1", 2, {"optimizer": "nvme"}),
    ],
)
def test_any_ranks_and_tiers(case: str, size: int, places: dict[str, Any], tmp_path: Path) -> None:
    options = {**places, "master": "float32", "timeout_s": 60, **({"nvme": str(tmp_path)} if places else {})}
    results = run_ranks(imported, size, case, options)
    state, optimizer, *_ = results[0]
    there = expected(case)
    trained = [name for name, p in build().named_parameters() if p.requires_grad]
    order = [n for n in trained if there[f"fp32.{n}"].dim() > 1] + [n for n in trained if there[f"fp32.{n}"].dim() <= 1]
    for number, name in enumerate(order):
        own = optimizer["state"][number]
        assert torch.equal(state[name], there[f"fp32.{name}"].bfloat16()), name
        assert torch.equal(own["master"], there[f"fp32.{name}"]), name
        assert torch.equal(own["exp_avg"], there[f"exp_avg.{name}"]), name
        assert torch.equal(own["exp_avg_sq"], there[f"exp_avg_sq.{name}"]), name
        assert float(own["step"]) == 2
    assert len({loss for *_, loss in results}) == 1, "all ranks go on together"
    whole = 4 * 4 * sum(there[f"fp32.{name}"].numel() for name in trained)  # parameters, masters and two moments in fp32
    read = [result[2] for result in results]
    assert whole <= sum(read) <= whole + size * 200, "each rank reads its own elements, and what is whole on all of them"


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    said = run_ranks(refused, 2, str(FOLDER / "stage1-bf16"), {"timeout_s": 60})
    assert "would both be x" in said[1]
    assert said[0]


@pytest.mark.parametrize(("on_meta", "dtype", "place"), [(False, torch.bfloat16, "memory"), (True, torch.float64, "drive")])
def test_names_and_types_on_two_ranks(on_meta: bool, dtype: torch.dtype, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout_s": 60, "master": "float32" if dtype == torch.bfloat16 else None}
    if place == "drive":
        options |= {**dict.fromkeys(("params", "grads", "optimizer"), "nvme"), "nvme": str(tmp_path)}
    (values, states), losses = run_ranks(saved, 2, str(tmp_path / "saved"), {"timeout_s": 60})[0]
    results = run_ranks(renamed, 2, str(tmp_path / "saved"), options, dtype, on_meta)
    found, its, _ = results[0]
    torch.testing.assert_close(found, {f"net.{name}": value.to(dtype) for name, value in values.items()}, rtol=0, atol=0)
    assert its["param_groups"] == states["param_groups"]
    for number, own in states["state"].items():
        for name, value in own.items():
            kept = torch.float64 if dtype == torch.float64 and name != "step" else torch.float32
            assert its["state"][number][name].dtype == kept, (number, name)
            assert torch.equal(its["state"][number][name], value.to(kept)), (number, name)
    assert results[0][2] == results[1][2], "all ranks go on together"
    assert results[0][2] == pytest.approx(losses, rel=0.02 if dtype == torch.bfloat16 else 1e-5)
