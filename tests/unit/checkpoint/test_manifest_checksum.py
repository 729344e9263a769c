"""The manifest's own checksum: damage to settings and to what the user saved beside is found, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.manifest import as_json
from zinf_compile.checkpoint.saved_files import read_manifest
from zinf_compile.cli.main import main
from zinf_compile.errors import CheckpointError

DIFFERS = r"manifest\.json is not the file that was saved: its checksum differs\. Load an older checkpoint, or fetch it again"


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the manifest of a checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return zinf_compile.save(folder, *built(), extra={"step": 1000}, wait=True) / "manifest.json"


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """Return the manifest of a copy of it, to be changed."""
    return Path(shutil.copytree(whole.parent, tmp_path / "saved")) / whole.name


@pytest.mark.parametrize(("old", "new"), [(b'["lr",0.001]', b'["lr",0.003]'), (b"0.999", b"0.992"), (b"1000", b"1008")])
def test_changed_settings_are_refused(
    old: bytes, new: bytes, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = saved.read_bytes()
    assert content.count(old) == 1
    saved.write_bytes(content.replace(old, new))
    model, optimizer = built()
    before = str(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=DIFFERS):
        zinf_compile.load(saved.parent, model, optimizer)
    assert str(optimizer.state_dict()) == before
    for command in (["inspect"], ["inspect", "--verify"], ["consolidate"]):
        out = [str(tmp_path / "out")] if command == ["consolidate"] else []
        assert main([*command, str(saved.parent), *out]) == 2
        assert "manifest.json is not the file that was saved: its checksum differs" in capsys.readouterr().err


def test_no_flipped_bit_changes_what_is_read(whole: Path) -> None:
    content, seen = whole.read_bytes(), 0
    expected = read_manifest(whole, content)
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            try:
                found = read_manifest(whole, bytes(damaged))
            except CheckpointError:
                continue
            assert found == expected, "only the name of the checksum's entry, or white space, has changed"
            seen += 1
    assert seen < 100


def test_an_entry_that_is_not_the_last(saved: Path) -> None:
    content = json.loads(saved.read_text())
    saved.write_bytes(as_json({"crc32c": content.pop("crc32c"), **content}))
    with pytest.raises(CheckpointError, match=DIFFERS):
        zinf_compile.load(saved.parent, *built())


def test_a_manifest_of_an_earlier_version(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--verify", str(saved.parent)]) == 0
    assert "not verified" not in capsys.readouterr().out
    assert main(["inspect", "--verify", "--json", str(saved.parent)]) == 0
    assert json.loads(capsys.readouterr().out)["unverified"] == []
    content = json.loads(saved.read_text())
    del content["crc32c"]
    saved.write_bytes(as_json(content))
    assert zinf_compile.load(saved.parent, *built()) == {"step": 1000}
    assert main(["inspect", "--verify", str(saved.parent)]) == 0
    assert "not verified  manifest.json: an earlier version has saved it without a checksum" in capsys.readouterr().out
    assert main(["inspect", "--verify", "--json", str(saved.parent)]) == 0
    assert json.loads(capsys.readouterr().out)["unverified"] == ["manifest.json"]


def test_equal_contents_have_equal_manifests(tmp_path: Path) -> None:
    model, optimizer = built()
    state = torch.get_rng_state()
    texts = set()
    for _ in range(2):
        torch.set_rng_state(state)
        texts.add((zinf_compile.save(tmp_path, model, optimizer, wait=True) / "manifest.json").read_bytes())
    assert len(texts) == 1
