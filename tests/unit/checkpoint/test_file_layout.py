"""The files of a checkpoint's parts, as PyTorch's own reader finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from zinf_compile.checkpoint.file_layout import FileLayout, lay_out
from zinf_compile.checkpoint.rectangles import Rectangle, cut_rectangles
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.runtime.comm.shard_ranges import shard_range

TENSORS = {
    "model.uneven": torch.arange(35.0).reshape(7, 5),
    "model.scale": torch.tensor(3.0, dtype=torch.float64),
    "model.half": torch.arange(24.0).reshape(2, 3, 4).bfloat16(),
    "model.short": torch.arange(2, dtype=torch.int64),
    "model.empty": torch.empty(0, 3),
}


def write(path: Path, layout: FileLayout) -> None:
    """Write a file of parts of `TENSORS`."""
    with path.open("wb") as file:
        file.write(layout.header)
        for part in layout.parts:
            assert file.tell() == part.begin
            rectangle = part.rectangle
            window = tuple(slice(o, o + s) for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True))
            file.write(TENSORS[part.key][window].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert file.tell() == layout.size


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pytorch_reads_them(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        parts = {
            key: (value.dtype, cut_rectangles(value.shape, *shard_range(value.numel(), ranks, rank)))
            for key, value in TENSORS.items()
        }
        if rank == 0:
            parts["model.empty"] = (torch.float32, [Rectangle((0, 0), (0, 3))])
        for number, layout in enumerate(lay_out(parts)):
            write(tmp_path / f"rank-{rank}-{number}.safetensors", layout)
    read = {key: torch.full_like(value, -1) for key, value in TENSORS.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for key, value in TENSORS.items():
        assert read[key].dtype == value.dtype
        assert torch.equal(read[key], value), key


def test_a_type_that_files_lack() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.w is torch\.complex128, which safetensors files don't hold; acc"):
        lay_out({"model.w": (torch.complex128, [Rectangle((0,), (1,))])})


def test_data_begins_at_a_page() -> None:
    (layout,) = lay_out({"b": (torch.bfloat16, [Rectangle((0,), (3,))]), "w": (torch.float32, [Rectangle((0,), (5,))])})
    assert [(part.key, part.begin, part.end) for part in layout.parts] == [("w", 4096, 4116), ("b", 4116, 4122)]
    assert lay_out({}) == []
