"""What `save` writes can be loaded; what couldn't be is refused before anything is written, and the checkpoint before stands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.cli.main import main
from zinf_compile.errors import CheckpointError, UnsupportedModelError

NAME = os.fsdecode(b"donn\xe9es.txt")


def nested(count: int) -> Any:
    """Return so many dicts inside of each other."""
    value: Any = float("inf")
    for _ in range(count):
        value = {"a": value}
    return value


def test_names_of_files_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 4)
    zinf_compile.save(tmp_path, model, wait=True)
    extra = {"file": NAME, NAME: {"size": torch.ones(2), "step": 3}}
    zinf_compile.save(tmp_path, model, extra=extra, wait=True)
    found = zinf_compile.load(tmp_path, model)
    assert found.keys() == extra.keys()
    assert (found["file"], found[NAME]["step"]) == (NAME, 3)
    assert torch.equal(found[NAME]["size"], torch.ones(2))
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    capsys.readouterr().out.encode()  # as a terminal does


@pytest.mark.parametrize("value", [nested(40), [1 - 10**4300]])
def test_the_largest_that_is_accepted(value: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    zinf_compile.save(tmp_path, model, extra={"x": value}, wait=True)
    assert zinf_compile.load(tmp_path, model) == {"x": value}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (nested(41), r"extra\.x.* is nested too deeply; accepted: 125 levels"),
        ([10**4300], r"extra\.x\.0 is a whole number of 14,285 bits; accepted: at most 4,300 digits"),
        (torch.zeros(4, dtype=torch.uint4), r"extra\.x is torch\.uint4, which safetensors files don't hold; accepted: \[torch"),
        (torch.zeros(4, dtype=torch.complex128), r"extra\.x is torch\.complex128, which safetensors files don't hold"),
    ],
)
def test_what_could_not_be_read_again(value: Any, text: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    zinf_compile.save(tmp_path, model, extra={"x": 1}, wait=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        zinf_compile.save(tmp_path, model, extra={"x": value}, wait=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert zinf_compile.load(tmp_path, model) == {"x": 1}


@pytest.mark.parametrize(
    ("name", "dtype", "error", "text"),
    [
        ("\udce9", torch.float32, CheckpointError, r"model\.\\udce9 has a name with a surrogate, which UTF-8 can't hold; acc"),
        ("b", torch.uint4, UnsupportedModelError, r"model\.b is torch\.uint4, which safetensors files don't hold; accepted"),
    ],
)
def test_buffers_that_no_file_holds(name: str, dtype: torch.dtype, error: type, text: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    model.register_buffer(name, torch.zeros(2, dtype=dtype))
    with pytest.raises(error, match=text):
        zinf_compile.save(tmp_path, model, wait=True)
    assert not list(tmp_path.iterdir())


def test_settings_that_the_reader_would_refuse(tmp_path: Path) -> None:
    """Settings of an optimizer are deeper in the manifest than `extra`: the reader itself is asked."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["notes"] = nested(40)
    with pytest.raises(CheckpointError, match=r"no checkpoint is saved in .*: load would refuse its manifest .*too deeply\)"):
        zinf_compile.save(tmp_path, model, optimizer, wait=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("numel", [2, 1 << 19])  # copied, and written before `save` returns
@pytest.mark.parametrize("kind", ["expanded", "conjugated", "negated", "turned"])
def test_tensors_that_are_views(kind: str, numel: int, tmp_path: Path) -> None:
    values = torch.complex(torch.arange(numel).float(), torch.ones(numel))
    view = {
        "expanded": torch.ones(1).expand(numel),
        "conjugated": values.conj(),
        "negated": values.conj().imag,
        "turned": torch.arange(2 * numel).view(numel, 2).t(),
    }[kind]
    model = nn.Linear(3, 4)
    model.register_buffer("seen", view)
    zinf_compile.save(tmp_path, model, extra={"x": view}, wait=True)
    other = nn.Linear(3, 4)
    other.register_buffer("seen", torch.zeros_like(view.resolve_conj().resolve_neg().contiguous()))
    assert torch.equal(zinf_compile.load(tmp_path, other)["x"], view)
    assert torch.equal(other.seen, view)


def test_manifests_are_ascii(tmp_path: Path) -> None:
    saved = zinf_compile.save(tmp_path, nn.Linear(3, 4), extra={"file": NAME}, wait=True)
    content = json.loads((saved / "manifest.json").read_bytes().decode("ascii"))
    assert content["settings"]["extra"] == {"dict": [["file", {"text": NAME.encode(errors="surrogatepass").hex()}]]}
