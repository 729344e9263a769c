"""What `zinf inspect` prints of a checkpoint, and says of what is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from zinf_compile.checkpoint.save import save
from zinf_compile.cli import inspect_checkpoint
from zinf_compile.cli.main import main


class Blocks(nn.Module):
    """Three equal blocks, a tied weight, a 16-bit one, a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.words = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.short = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for step in (1, 2):
        extra = {"step": step, "worst": float("inf"), "order": torch.arange(3), "seen": np.zeros(2)}
        save(tmp_path, model, optimizer, extra=extra, keep=2)
    return tmp_path


def test_json_has_the_documented_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "--verify"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = inspect_checkpoint.examine.__doc__ or ""
    assert all(key in documented for key in found)
    assert (found["version"], found["ranks"]) == (1, 1)
    assert found["folder"] == str(folder / "save-00000002")
    assert found["parameters"]["elements"] == 3 * 20 + 20 + 3 + 1 + 2
    assert found["tensors"]["model.short"] == {"shape": [3], "dtype": "bfloat16", "bytes": 6, "parts": 1}
    assert found["aliases"] == {"head.weight": "words.weight"}
    assert found["optimizers"]["optimizer"]["class"] == "AdamW"
    assert found["optimizers"]["optimizer"]["groups"][0]["settings"]["lr"] == 0.25
    assert found["extra"] == {"step": 2, "worst": "inf", "order": "tensor [3] int64", "seen": "tensor [2] float64"}
    assert found["files"] == {path.name: path.stat().st_size for path in (folder / "save-00000002").iterdir()}
    assert found["verified"] == sum(tensor["bytes"] for tensor in found["tensors"].values())


def test_equal_blocks_are_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["model.blocks.*.weight", "3", "[4,", "4]", "float32", "192"] in rows
    assert ["optimizer.state.blocks.*.weight.exp_avg", "3", "[4,", "4]", "float32", "192"] in rows
    assert ["optimizer.state.*.step", "9", "[]", "float32", "36"] in rows
    assert "(beside save-00000001)" in printed
    assert "head.weight is words.weight" in printed
    assert "lr=0.25" in printed
    assert 'order: "tensor [3] int64"' in printed


def test_nothing_damaged_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (folder / "save-00000002").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(folder), "--verify"]) == 2
    said = capsys.readouterr().err
    assert "is damaged (1 problem)" in said
    assert "the checksum of random.0.cpu differs" in said
    file.write_bytes(content[:-4])
    assert main(["inspect", str(folder), "--verify"]) == 2
    assert str(file) in capsys.readouterr().err
    assert main(["inspect", str(folder / "save-00000001"), "--verify"]) == 0


def test_what_a_header_tells_other_readers_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where in the whole a tensor lies, in the words of torch.distributed.checkpoint: whichever byte of it is another one."""
    (file,) = (folder / "save-00000002").glob("*.safetensors")
    content = file.read_bytes()
    begin, end = content.index(b"__metadata__") + 15, content.index(b'"}', content.index(b"DCP_SHARDING_INFO"))
    for place in range(begin, end, 23):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        assert main(["inspect", str(folder), "--verify"]) == 2, damaged[place - 20 : place + 20]
    said = capsys.readouterr().err
    assert "says of its tensors' places in the whole, for other readers, what its manifest doesn't" in said
    file.write_bytes(content)
    assert main(["inspect", str(folder), "--verify"]) == 0


def test_a_header_that_differs_from_the_manifest_is_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (folder / "save-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"model.short", b"model.shard"))
    assert main(["inspect", str(folder), "--verify"]) == 2
    said = capsys.readouterr().err
    assert "of model.shard, its manifest says nothing" in said
    assert "has nothing of model.short" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no checkpoint: neither manifest.json nor a folder such as save-00000001"),
        ("{}", "its format is None"),
        ('{"format": "zinf_compile checkpoint", "version": 2}', "is of version 2; accepted: 1"),
        ('{"format": "zinf_compile checkpoint", "version": 1}', "it lacks tensors, settings or ranks"),
        ("[1]", "a list, not an object"),
        ("pickled", "is no manifest of a checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_explained(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    assert main(["inspect", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_folder_and_a_file_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "none does not exist" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["inspect", str(tmp_path / "file")]) == 2
    assert "file cannot be read as a folder" in capsys.readouterr().err
