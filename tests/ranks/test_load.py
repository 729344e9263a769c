"""Loads on several ranks: bad input is an error on all of them, and each reads the bytes that it needs."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_checkpoint import Uneven, loaded, saved
from rank_load import failed, onto_meta, read_bytes, saved_kinds, stepped
from ranks import run_ranks

import zinf_compile

pytestmark = pytest.mark.distributed

ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


def away(folder: Path) -> dict[str, Any]:
    return {**ALL_AWAY, "nvme": str(folder), "timeout_s": 60}


@pytest.mark.parametrize("place", ["memory", "drive"])
def test_bad_input_is_an_error_on_all_ranks(place: str, tmp_path: Path) -> None:
    run_ranks(failed, 2, str(tmp_path), {"timeout_s": 60} if place == "memory" else away(tmp_path))


def test_a_step_that_failed_on_one_rank(tmp_path: Path) -> None:
    pieces = {"compute_shape": {"piece_numel": 256}}
    for size in (1, 2):
        run_ranks(stepped, size, str(tmp_path / str(size)), {**away(tmp_path), **pieces})


def test_each_rank_reads_what_it_needs(tmp_path: Path) -> None:
    run_ranks(read_bytes, 2, str(tmp_path), away(tmp_path))
    generators = 2 * (
        torch.get_rng_state().numel() + 8 * (1 + len(random.getstate()[1]) + 2) + 8 * (624 + 4)
    )  # checked, then restored
    for rank, (read, needed) in enumerate(run_ranks(read_bytes, 3, str(tmp_path), away(tmp_path))):
        own = needed + (generators if rank < 2 else 0)  # of the ranks that saved
        assert own <= read <= own + 9000, (rank, read, needed)


READ_BY_PYTORCH_ALONE = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, expected = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
read = {name: torch.full_like(value, -1) for name, value in expected.items()}
dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
for name, value in expected.items():
    assert read[name].dtype == value.dtype and read[name].shape == value.shape and torch.equal(read[name], value), name
assert not [name for name in sys.modules if name.startswith("zinf")]
print(len(expected), sorted({str(value.dtype) for value in expected.values()}), min(value.numel() for value in expected.values()))
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pytorch_alone_reads_every_kind_of_tensor(ranks: int, tmp_path: Path) -> None:
    run_ranks(saved_kinds, ranks, str(tmp_path), {"timeout_s": 60})
    (folder,) = (tmp_path / "saved").iterdir()
    command = [sys.executable, "-W", "ignore", "-c", READ_BY_PYTORCH_ALONE, str(folder), str(tmp_path / "expected.pt")]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert run.stdout.strip() == "39 ['torch.bfloat16', 'torch.float16', 'torch.float32'] 0"


def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model of `rank_save` as plain PyTorch has it."""
    torch.manual_seed(0)
    model = Uneven()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, fused=True)


@pytest.mark.parametrize("place", ["memory", "drive"])
def test_plain_pytorch_and_back(place: str, tmp_path: Path) -> None:
    """A model and an optimizer that were never compiled, to two ranks in tiles and from there, then to one that never ran."""
    options = {"timeout_s": 60} if place == "memory" else {**away(tmp_path), "tile": 2048}
    model, optimizer = plain()
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
    zinf_compile.save(tmp_path / "plain", model, optimizer, extra={"step": 3, "names": ("a", torch.arange(3))})
    (values, states), _ = run_ranks(loaded, 2, str(tmp_path / "plain"), options)[0]
    torch.testing.assert_close(dict(values), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(states["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    (values, states), _ = run_ranks(saved, 2, str(tmp_path / "ranks"), options)[0]
    zinf_compile.load(tmp_path / "ranks", model, optimizer)
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], states["state"], rtol=0, atol=0)
    fresh, its = plain()
    zinf_compile.load(tmp_path / "ranks", fresh, its)
    torch.testing.assert_close(its.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_four_ranks_to_two(tmp_path: Path) -> None:
    found, _ = run_ranks(saved, 4, str(tmp_path / "saved"), {**away(tmp_path), "tile": 2048})[0]
    after, _ = run_ranks(loaded, 2, str(tmp_path / "saved"), {"timeout_s": 60})[0]
    torch.testing.assert_close(after, found, rtol=0, atol=0)


@pytest.mark.parametrize(("before", "after", "place"), [(2, 3, "drive"), (3, 2, "memory")])
def test_a_model_on_meta(before: int, after: int, place: str, tmp_path: Path) -> None:
    options = {"timeout_s": 60} if place == "memory" else {**away(tmp_path), "tile": 2048}
    found, _ = run_ranks(saved, before, str(tmp_path / "saved"), {"timeout_s": 60})[0]
    expected = run_ranks(loaded, after, str(tmp_path / "saved"), options)[0]
    results = run_ranks(onto_meta, after, str(tmp_path / "saved"), options)
    torch.testing.assert_close(results[0][0], found, rtol=0, atol=0)
    for _, losses, (read, again) in results:
        assert losses == expected[1]
        assert again <= read <= again + 256, "whether it fits is seen without the values; settings and `extra` are read twice"
