"""What `zinf consolidate` makes of checkpoints that several ranks have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from rank_consolidate import saved_models
from ranks import run_ranks
from safetensors.torch import load_file

from zinf_compile.checkpoint import consolidate
from zinf_compile.checkpoint.saved_files import SavedFiles
from zinf_compile.cli.main import main

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the folder of two checkpoints, and what is in them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, *run_ranks(saved_models, 3, str(folder))[0]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("file_bytes", ["4GiB", "8KiB"])
def test_transformers_loads_it(file_bytes: str, saved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    folder, state, _ = saved
    for _ in range(2):  # the second time over the first one's files
        assert main(["consolidate", str(folder / "qwen2"), str(tmp_path), "--file-bytes", file_bytes]) == 0
    assert not (tmp_path / "config.json").exists(), "none is invented"
    files = sorted(path.name for path in tmp_path.iterdir())
    assert (files == ["model.safetensors"]) == (file_bytes == "4GiB")
    if file_bytes == "8KiB":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(files) - {"model.safetensors.index.json"}
        assert all(sum(t.nbytes for t in load_file(f).values()) <= 8192 for f in tmp_path.glob("*.safetensors"))
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(tmp_path).values())
    found = read(tmp_path)
    assert set(state) - set(found) == {"lm_head.weight"}, "the tied weight is there once"
    from transformer_models import qwen2  # noqa: PLC0415

    qwen2().config.save_pretrained(tmp_path)
    model, said = hf.Qwen2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def test_pieces_are_small_in_any_order_of_memory(
    saved: tuple[Path, dict, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, state = saved
    sizes = []

    read_range = SavedFiles.read

    def reading(files: SavedFiles, key: str, start: int, into: torch.Tensor) -> None:
        sizes.append(into.nbytes)
        read_range(files, key, start, into)

    monkeypatch.setattr(consolidate, "PIECE_BYTES", 100)
    monkeypatch.setattr(SavedFiles, "read", reading)
    assert main(["consolidate", str(folder / "uneven"), str(tmp_path)]) == 0
    assert max(sizes) == 100
    torch.testing.assert_close(read(tmp_path), {**state}, rtol=0, atol=0)


def test_what_lies_beside_is_copied_and_kept(saved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    folder = saved[0] / "uneven"
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('["a"]')
    try:
        (tmp_path / "config.json").write_text("mine")
        assert main(["consolidate", str(folder), str(tmp_path)]) == 0
        assert (tmp_path / "config.json").read_text() == "mine"
        assert (tmp_path / "tokenizer.json").read_text() == '["a"]'
    finally:
        (folder / "config.json").unlink()
        (folder / "tokenizer.json").unlink()


def test_a_failure_leaves_the_old_files(
    saved: tuple[Path, dict, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = saved[0], tmp_path / "out"
    assert main(["consolidate", str(folder / "qwen2"), str(out), "--file-bytes", "8KiB"]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    checkpoint = folder / "uneven" / "save-00000001"
    parts = json.loads((checkpoint / "rank-00002.json").read_text()).items()
    file, begin = next((checkpoint / name, part["model.words.weight"]["begin"]) for name, part in parts)
    content = file.read_bytes()
    file.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :])
    try:
        status = main(["consolidate", str(folder / "uneven"), str(out), "--file-bytes", "1KiB"])
    finally:
        file.write_bytes(content)
    assert status == 2
    assert "the checksum of model.words.weight" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    assert main(["consolidate", str(folder / "uneven"), str(out)]) == 2
    assert "bytes, 5 are free; nothing was written" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


class _Usage:
    free = 5


def test_it_is_not_written_into_the_checkpoint(saved: tuple[Path, dict, dict], capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved[0] / "uneven"
    assert main(["consolidate", str(folder), str(folder)]) == 2
    assert "is the folder of the checkpoint itself" in capsys.readouterr().err
