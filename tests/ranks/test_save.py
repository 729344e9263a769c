"""Checkpoints that each rank writes and reads for itself: equal to the bit on any ranks, tiers and tiles."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_checkpoint import bounded, loaded, saved
from ranks import run_ranks

from zinf_compile.runtime.storage.engine import crc32c

pytestmark = pytest.mark.distributed

PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "states on a drive": {"optimizer": "nvme"},
    "all on a drive, in tiles": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "tile": 2048},
    "in memory, in the same tiles": {"tile": 2048},
    "in memory, in other tiles": {"tile": 1024},
    "in memory, in other buckets": {"bucket": 4096},
}


def placed(place: str, folder: Path) -> dict[str, Any]:
    """Return the options of a place."""
    options = PLACES[place]
    return {**options, "timeout_s": 60} | ({"nvme": str(folder)} if "nvme" in options.values() else {})


def check_format(folder: Path, ranks: int, model: dict[str, torch.Tensor]) -> None:
    """Check that safetensors and JSON are all that is in one flat folder, and what the manifest says of axes and boxes.

    Version, types, checksums; and boxes in which each element of a tensor is exactly once.
    """
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())
    names = {path.name for path in folder.iterdir()}
    assert all(re.fullmatch(r"manifest\.json|rank-\d{5}(\.json|-\d{4}\.safetensors)", name) for name in names), names
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == {"format", "version", "mesh", "tensors", "settings", "ranks", "crc32c"}
    assert (manifest["format"], manifest["version"]) == ("zinf_compile checkpoint", 1)
    assert manifest["mesh"] == [{"axis": "shard", "size": ranks}]
    assert manifest["ranks"] == [crc32c((folder / f"rank-{rank:05}.json").read_bytes()) for rank in range(ranks)]
    covered = {key: torch.zeros(tensor["shape"], dtype=torch.int8) for key, tensor in manifest["tensors"].items()}
    for rank in range(ranks):
        for file, parts in json.loads((folder / f"rank-{rank:05}.json").read_text()).items():
            assert file in names
            for key, part in parts.items():
                assert part["crc32c"] or not math.prod(part["sizes"])
                box = tuple(slice(start, start + size) for start, size in zip(part["offsets"], part["sizes"], strict=True))
                covered[key][box] += 1
    assert all((count == 1).all() for count in covered.values())
    for name in manifest["tensors"].keys() & {f"model.{name}" for name in model}:  # tied ones are there once
        shape = [*model[name.removeprefix("model.")].shape]
        assert manifest["tensors"][name] == {"shape": shape, "dtype": "float32", "block": 1, "scales": None}
    assert len(manifest["tensors"].keys() & {f"model.{name}" for name in model}) == len(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "memory"), (1, "all on a drive, in tiles")),
        ((1, "all on a drive, in tiles"), (3, "states on a drive")),
        ((3, "all on a drive, in tiles"), (2, "memory")),
        ((1, "all on a drive, in tiles"), (1, "in memory, in the same tiles")),
        ((2, "memory"), (2, "states on a drive")),
        ((2, "all on a drive, in tiles"), (2, "in memory, in other tiles")),
        ((2, "memory"), (2, "in memory, in other buckets")),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_tiers_and_tiles_may_differ(before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    (model, optimizer), went_on = run_ranks(saved, before[0], str(tmp_path / "saved"), placed(before[1], tmp_path))[0]
    found, again = run_ranks(loaded, after[0], str(tmp_path / "saved"), placed(after[1], tmp_path))[0]
    torch.testing.assert_close(found, (model, optimizer), rtol=0, atol=0)
    shapes = [(ranks, PLACES[place].get("tile"), PLACES[place].get("bucket")) for ranks, place in (before, after)]
    if shapes[0] == shapes[1]:
        assert again == went_on
    else:
        assert again == pytest.approx(went_on, rel=1e-5), "the bound that docs/checkpoints.md states"
    (folder,) = (tmp_path / "saved").iterdir()
    check_format(folder, before[0], model)
    read = {f"model.{name}": torch.empty_like(value) for name, value in model.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, value in model.items():
        assert torch.equal(read[f"model.{name}"], value), name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_little_is_in_memory_and_nothing_comes_from_other_ranks(size: int, tmp_path: Path) -> None:
    options = {**placed("states on a drive", tmp_path), "params": "nvme", "grads": "nvme"}
    for saving, loading, own, received in run_ranks(bounded, size, str(tmp_path / "saved"), options, alone=True):
        assert own > 100 << 20
        assert saving < 80 << 20, "64 MiB in flight, and a thread"
        assert loading < 80 << 20
        assert received == 0
