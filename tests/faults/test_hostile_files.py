"""What isn't a file, indices that lead elsewhere, and files that don't agree: refused by name, never a hang."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp
from rank_hostile import refuse_on_ranks
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.safetensors_index import INDEX, SINGLE
from zinf_compile.checkpoint.safetensors_reader import TensorFiles
from zinf_compile.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)  # a hang is what must not be


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)  # its address has room for 107 bytes
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


NO_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a FIFO": (fifo, "is a FIFO; accepted: a file"),
    "a folder": (lambda path: path.mkdir(), "is a folder; accepted: a file|holds 0 files"),
    "a socket": (listening, "is a socket; accepted: a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device; accepted: a file"),
    "a terminal": (lambda path: path.symlink_to("/dev/ptmx"), "is a device; accepted: a file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot open|holds 0 files|missing"),
    "a link to nowhere": (lambda path: path.symlink_to("nowhere"), "cannot open|holds 0 files|holds 1|missing"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    make, said = NO_FILES[kind]
    for number, name in enumerate((SINGLE, INDEX, "part.safetensors")):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        if name == "part.safetensors":
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        elif name == INDEX and kind == "a folder":
            continue  # given by itself it is a folder without files
        for path in (folder, folder / name):
            with pytest.raises(CheckpointError, match=f"({said})"):
                TensorFiles(path)


def index(folder: Path, weight_map: object, **more: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))


def test_an_index_leads_to_files_of_its_folder_only(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, outside)
    for name in ("../outside.safetensors", str(outside), "sub/../../outside.safetensors", "..", ""):
        index(folder, {"a": name})
        with pytest.raises(CheckpointError, match=r"the file of a is .* (leads out of the folder|no name of a file)"):
            TensorFiles(folder)
    for name in (3, None, ["x"], {"x": 1}, True, "a\0b"):
        index(folder, {"a": name})
        with pytest.raises(CheckpointError, match="the file of a is "):
            TensorFiles(folder)
    (folder / "sub").mkdir()
    for link in ("link.safetensors", "sub/link.safetensors", "..b.safetensors"):
        (folder / link).symlink_to(outside)  # as the hub's cache has them
        index(folder, {"a": link})
        with pytest.raises(KeyError):
            TensorFiles(folder).tensors["b"]
        assert TensorFiles(folder).tensors["a"].shape == (2,)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "3", "", "{", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": "x"}', '{"metadata": {}}', "\ufeff{}",
        '{"weight_map": {"a": "x", "a": "y"}}', '{"weight_map": {}, "weight_map": {}}', '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": NaN}',
    ],
)  # fmt: skip
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"is no index of safetensors files .*; accepted: JSON with a weight_map"):
        TensorFiles(tmp_path)


def test_an_index_of_other_bytes(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"\xff": "x"}}')
    with pytest.raises(CheckpointError, match=f"cannot read .*{INDEX}"):
        TensorFiles(tmp_path)
    with open(tmp_path / INDEX, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"{INDEX} has 1,099,511,627,776 bytes; accepted"):
        TensorFiles(tmp_path)


def test_files_that_do_not_agree_with_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "1.safetensors")
    save_file({"c": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "2.safetensors")
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    files = TensorFiles(tmp_path)
    assert files.tensors.keys() == {"a", "b", "c"}, "what the index doesn't name is not part of the model"
    files.close()
    index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"2\.safetensors .*: b is missing, which the index says is in it"):
        TensorFiles(tmp_path)
    save_file({"c": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor b is both in .*1\.safetensors and in .*2\.safetensors"):
        TensorFiles(tmp_path)
    index(tmp_path, {"a": "1.safetensors", "c": "3.safetensors"})
    with pytest.raises(CheckpointError, match=r"names files that are missing: .*3\.safetensors"):
        TensorFiles(tmp_path)


def test_a_single_file_counts_before_an_index_as_for_transformers(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    index(tmp_path, {"a": "other.safetensors"})
    files = TensorFiles(tmp_path)
    assert files.tensors["a"].path == tmp_path / SINGLE
    files.close()


def test_a_model_stays_as_it_was(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with torch.device("meta"):
        model = Mlp()
    with pytest.raises(CheckpointError, match=rf"{SINGLE} is a FIFO"):
        zinf_compile.partition(model, checkpoint=tmp_path)
    assert {(type(p), p.device.type) for p in model.parameters()} == {(nn.Parameter, "meta")}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_ranks(tmp_path: Path) -> None:
    assert all(run_ranks(refuse_on_ranks, 2, str(tmp_path)))
