"""Files of parts that are written in any order: what any reader finds in them, and what is said where something is wrong."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zinf_compile.checkpoint import parts_writer
from zinf_compile.checkpoint.file_layout import lay_out
from zinf_compile.checkpoint.parts_writer import PartsWriter, StagingBuffers
from zinf_compile.checkpoint.rectangles import Rectangle
from zinf_compile.errors import StoreRequestError
from zinf_compile.runtime.storage.engine import Engine, Request, crc32c

PARTS = {
    "w": torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)),
    "half": torch.arange(7001.0).bfloat16(),
    "number": torch.tensor(5, dtype=torch.int64),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def writer(path: Path, engine: Engine) -> PartsWriter:
    parts = {k: (v.dtype, [Rectangle((0,) * v.dim(), tuple(v.shape))]) for k, v in PARTS.items()}
    return PartsWriter(path, lay_out(parts)[0], engine, StagingBuffers(2, 3 * 4096))


@pytest.mark.parametrize("seed", range(3))
def test_pieces_in_any_order(tmp_path: Path, engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_writer, "CHECKED_BYTES", 5000)
    found = writer(tmp_path / "a.safetensors", engine)
    drawn = random.Random(seed)
    pieces = []
    for part in found.layout.parts:
        cuts = sorted(drawn.choices(range(part.rectangle.numel + 1), k=4))
        pieces += [(part, a, b) for a, b in zip([0, *cuts], [*cuts, part.rectangle.numel], strict=True)]
    drawn.shuffle(pieces)
    for part, start, end in pieces:
        piece = PARTS[part.key].reshape(-1)[start:end].clone()
        found.write(part, start, piece)
        piece.zero_()  # which was copied
    checksums = found.finish()
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == PARTS.keys()
    for key, value in PARTS.items():
        assert read[key].dtype == value.dtype
        assert torch.equal(read[key], value), key
        data = value.reshape(-1).view(torch.uint8)
        assert checksums[key] == [crc32c(data[begin : begin + 5000]) for begin in range(0, data.numel(), 5000)]


def test_what_was_never_written(tmp_path: Path, engine: Engine) -> None:
    found = writer(tmp_path / "a.safetensors", engine)
    for part in found.layout.parts:
        if part.key != "half":
            found.write(part, 0, PARTS[part.key].reshape(-1))
        else:
            found.write(part, 100, PARTS["half"][100:])
    with pytest.raises(StoreRequestError, match=r"half was not written from byte \d+ to \d+ of .*a\.safetensors"):
        found.finish()
    found.abandon()


@pytest.mark.parametrize(("start", "values"), [(1, torch.zeros(15000)), (0, torch.zeros(5, dtype=torch.float64))])
def test_what_does_not_fit(tmp_path: Path, engine: Engine, start: int, values: torch.Tensor) -> None:
    found = writer(tmp_path / "a.safetensors", engine)
    part = next(part for part in found.layout.parts if part.key == "w")
    with pytest.raises(StoreRequestError, match=r"elements of torch\.float\d+ from \d on, for w of 15000 torch\.float32 in"):
        found.write(part, start, values)
    found.abandon()


def test_a_name_that_is_taken(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "a.safetensors").write_text("another's")
    with pytest.raises(FileExistsError, match=r"a\.safetensors"):
        writer(tmp_path / "a.safetensors", engine)
    assert (tmp_path / "a.safetensors").read_text() == "another's"


def test_more_threads_than_staging_buffers(tmp_path: Path, engine: Engine) -> None:
    found, whole = writer(tmp_path / "a.safetensors", engine), PARTS["w"].reshape(-1)
    part = next(part for part in found.layout.parts if part.key == "w")
    starts = range(0, whole.numel(), 1000)
    held = [found._staging.take() for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        written = [pool.submit(found.write, part, start, whole[start : start + 1000]) for start in starts]
        for buffer in held:
            found._staging.used(buffer, [])
        for each in written:
            each.result()
    found.abandon()
    data = (tmp_path / "a.safetensors").read_bytes()[part.begin : part.end]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), whole)


def test_closed_while_another_thread_writes(tmp_path: Path, engine: Engine) -> None:
    found = writer(tmp_path / "a.safetensors", engine)
    part = next(part for part in found.layout.parts if part.key == "w")

    class Late(Request):
        def __init__(self) -> None:
            pass

        def wait(self) -> int | None:
            found.write(part, 0, PARTS["w"].reshape(-1)[:2000])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    found._requests["w"][part.end] = 0, Late()
    found.abandon()
    with pytest.raises(ValueError, match="I/O on a closed file"):
        found.write(part, 0, PARTS["w"].reshape(-1)[:2000])


def test_a_staging_buffer_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"a staging buffer of 5000 bytes; accepted: two pages, \d+ bytes, or more"):
        StagingBuffers(1, 5000)
