"""Saved checkpoints that don't fit or are damaged: named, and nothing is changed. The models are whole, nothing is compiled."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_manifests import edit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.saved_files import SavedFiles
from zinf_compile.errors import CheckpointError, UnsupportedModelError


class Small(nn.Module):
    """A matrix, a vector, a number, a weight in channels-last, and a buffer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().sum() + self.conv(torch.ones(1, 2, 3, 3)).square().sum()


def trained(seed: int = 0, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = Small(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint."""
    model, optimizer = trained()
    return zinf_compile.save(tmp_path_factory.mktemp("whole"), model, optimizer, extra={"step": 1, "more": torch.arange(3)})


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "saved" / whole.name))


def refused(folder: Path, match: str, *, model: nn.Module | None = None, optimizer: Any = None) -> str:
    """Load; return what the error says. Nothing is changed."""
    given_model, given_optimizer = trained(1)
    model, optimizer = model or given_model, optimizer if model is not None else given_optimizer
    before = copy.deepcopy((model.state_dict(), [] if optimizer == () else optimizer.state_dict()))
    with pytest.raises(CheckpointError, match=match) as error:
        zinf_compile.load(folder, model, optimizer)
    after = model.state_dict(), [] if optimizer == () else optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    return str(error.value)


def test_whole_it_loads(saved: Path) -> None:
    (model, optimizer), (other, its) = trained(0), trained(1)
    assert zinf_compile.load(saved.parent, other, its)["step"] == 1
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(its.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_another_model_names_all_mismatches_at_once(saved: Path) -> None:
    model = Small(width=7).half()
    model.register_buffer("seen", None)
    model.extra = nn.Parameter(torch.ones(2))
    said = refused(saved, r"doesn't fit; nothing was changed", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    for text in (
        "missing: extra",
        "unexpected: seen",
        "shape of linear.weight: [3, 5] in the checkpoint, [3, 7] in the model",
        "type of scale: torch.float32 in the checkpoint, torch.float16 in the model",
        "group 0 of optimizer has extra besides",
    ):
        assert text in said, text


def test_another_optimizer(saved: Path) -> None:
    model, _ = trained(1)
    refused(
        saved, "optimizer is a AdamW in the checkpoint, SGD is given", model=model, optimizer=torch.optim.SGD(model.parameters())
    )
    fewer = torch.optim.AdamW([p for p in model.parameters() if p.dim()])
    refused(saved, "group 0 of optimizer lacks scale", model=model, optimizer=fewer)
    apart = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    refused(saved, r"has 1 groups of parameters in the checkpoint, 5 are given", model=model, optimizer=apart)
    turned = torch.optim.AdamW(list(model.parameters())[::-1])
    refused(saved, "group 0 of optimizer has its parameters in another order", model=model, optimizer=turned)
    two = [torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())]
    with pytest.raises(CheckpointError, match="1 optimizers in the checkpoint, 2 given"):
        zinf_compile.load(saved, model, two)


def test_a_model_on_meta(saved: Path) -> None:
    with torch.device("meta"):
        model = Small()
    with pytest.raises(
        UnsupportedModelError, match=r"was not compiled.*or call zinf_compile.partition\(model, checkpoint=FOLDER, \.\.\.\)"
    ):
        zinf_compile.load(saved, model)
    (model, _) = trained(0)
    model.seen = model.seen.to("meta")
    with pytest.raises(CheckpointError, match=r"seen is on meta, other tensors of the model are not"):
        zinf_compile.load(saved, model)


def test_the_model_alone(saved: Path) -> None:
    (model, _), (other, _) = trained(0), trained(1)
    zinf_compile.load(saved, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def data_of(folder: Path) -> Path:
    """Return the largest file of tensors."""
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_damaged_files(saved: Path) -> None:
    path = data_of(saved)
    content = path.read_bytes()
    for bit in (1, 1 << 7):
        path.write_bytes(content[:-1] + bytes([content[-1] ^ bit]))
        refused(saved, rf"{path.name} is damaged: the checksum of \S+ differs in its bytes 0 to [\d,]+\. Load an older")
    path.write_bytes(content[:-1])
    refused(saved, rf"{path.name} has [\d,]+ bytes, its manifest says [\d,]+: it was cut off")
    path.write_bytes(b"")
    refused(saved, "it was cut off")
    path.unlink()
    refused(saved, rf"{path.name} of the checkpoint cannot be read: No such file")
    path.mkdir()
    refused(saved, rf"{path.name} is a folder; accepted: a file")


def test_swapped_files(saved: Path, tmp_path: Path) -> None:
    model, optimizer = trained(5)
    other = zinf_compile.save(tmp_path / "other", model, optimizer, extra={"step": 1, "more": torch.arange(3)})
    shutil.copy(data_of(other), saved)
    refused(saved, r"is damaged: the checksum of \S+ differs")
    shutil.copy(other / "rank-00000.json", saved)
    refused(saved, "rank-00000.json is not the file that was saved: its checksum differs")


def test_links_and_names_that_leave_the_folder(saved: Path, tmp_path: Path) -> None:
    path = data_of(saved)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(saved, rf"{path.name} is a symbolic link; accepted: a file")
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    for name in (
        f"../{saved.name}/{path.name}",
        str(path),
        "..",
        "",
        "sub/x.safetensors",
        ".hidden.safetensors",
        "a\0.safetensors",
    ):
        edited = shutil.copytree(saved, tmp_path / "edited" / saved.name)
        edit(edited / "rank-00000.json", lambda content, name=name: content.update({name: content.pop(path.name)}))
        refused(edited, "which is no name of a file in its folder")
        shutil.rmtree(edited)
    manifest = saved / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    manifest.symlink_to(tmp_path / "manifest.json")
    refused(saved, r"manifest.json is a symbolic link")


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist; accepted: a folder in which save")
    refused(tmp_path, r"has no checkpoint: neither manifest.json nor a folder such as save-00000001")
    (tmp_path / ".save-00000003-0123456789abcdef.partial").mkdir()
    refused(tmp_path, r"A save was begun and has not ended: \.save-00000003")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is no file of torch.save, or was not written to its end")
    (tmp_path / "save-00000004").mkdir()
    refused(tmp_path, r"save-00000004 has no checkpoint")
    os.mkfifo(tmp_path / "save-00000004" / "manifest.json")
    refused(tmp_path, r"manifest.json is a FIFO")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"a": 1, "a": 2}', "\xff", "[" * 5000, '{"x": NaN}'])
def test_nonsense(text: str, saved: Path) -> None:
    (saved / "manifest.json").write_text(text, encoding="latin1")
    refused(saved, r"manifest.json (is no manifest of a checkpoint|is damaged, or no save has written it)")


def test_a_later_version(saved: Path) -> None:
    edit(saved / "manifest.json", lambda content: content.update(version=2))
    refused(saved, "is of version 2; accepted: 1. Load it with the version")


def test_values_kept_with_scales(saved: Path) -> None:
    path = saved / "manifest.json"
    scale = json.loads(path.read_text())["tensors"]["model.scale"]
    assert scale == {"shape": [], "dtype": "float32", "block": 1, "scales": None}
    edit(path, lambda content: content["tensors"]["model.scale"].update(block=64, scales="float32"))
    refused(saved, "'model.scale' is kept in blocks of 64 elements with scales of type 'float32'; accepted: elements that are")
    edit(path, lambda content: [content["tensors"]["model.scale"].pop(name) for name in ("block", "scales")])
    zinf_compile.load(saved, *trained(1))  # as the first version wrote it


@pytest.mark.parametrize(
    "tiles",
    [
        {},
        [1],
        [{"default": 4 << 20, "tile": 2 << 20, "piece_numel": 1 << 18}],
        [{"default": 4 << 20, "tile": 2 << 20, "piece_numel": 1 << 18, "parameters": [1]}],
        [{"default": 4 << 20, "tile": 4 << 20, "piece_numel": 1 << 18, "parameters": []}],
        [{"default": 4 << 20, "tile": 1, "piece_numel": 1 << 18, "parameters": []}],
        [{"default": 4 << 20, "tile": 2 << 20, "piece_numel": -1, "parameters": []}],
        [{"default": 4 << 20, "tile": 2 << 20, "piece_numel": "1", "parameters": []}],
    ],
)
def test_tiles_that_no_save_writes(tiles: Any, saved: Path) -> None:
    edit(saved / "manifest.json", lambda content: content["settings"].update(tiles=tiles))
    refused(saved, "is damaged, or no save has written it: tiles of parameters are ")


def test_tiles_of_parameters_that_are_not_there(saved: Path) -> None:
    """Or that are whole: nothing is cut."""
    tiles = [{"default": 4 << 20, "tile": 2 << 20, "piece_numel": 1, "parameters": ["linear.weight", "gone"]}]
    edit(saved / "manifest.json", lambda content: content["settings"].update(tiles=tiles))
    zinf_compile.load(saved, *trained(1))


def test_parts_that_overlap_or_are_missing(saved: Path) -> None:
    path = saved / "rank-00000.json"

    def without(content: Any) -> None:
        for parts in content.values():
            parts.pop("model.linear.bias", None)

    before = path.read_text()
    edit(path, without)
    refused(saved, r"the parts of model.linear.bias don't make up the 3 elements of \[3\]; 0 are there")
    path.write_text(before)

    def beyond(content: Any) -> None:
        for parts in content.values():
            if "model.linear.bias" in parts:
                parts["model.linear.bias"]["offsets"] = [1]

    edit(path, beyond)
    refused(saved, r"the part of model.linear.bias in .*, \[3\] at \[1\], is not within its shape \[3\]")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


NONSENSE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.integers(-(1 << 70), 1 << 70), st.floats(-2, 1e9), st.text(max_size=5),
    st.just([]), st.just({}), st.lists(st.integers(-1, 4), max_size=3), st.just({"tensor": "model.scale"}),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_manifests(data: st.DataObject, whole: Path, tmp_path: Path) -> None:
    """One value, or several, become others: refused and nothing changed, or all of it loads."""
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    for _ in range(data.draw(st.integers(1, 2))):
        path = folder / data.draw(st.sampled_from(["manifest.json", "rank-00000.json"]))
        content = json.loads(path.read_text())
        if not content:
            break
        *way, last = data.draw(st.sampled_from([found for found in places(content) if found]))
        inner = content
        for key in way:
            inner = inner[key]
        action = data.draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "replace":
            inner[last] = data.draw(NONSENSE)
        elif action == "remove":
            del inner[last]
        elif isinstance(inner, dict):
            inner[data.draw(st.text(max_size=4))] = inner.pop(last)
        edit(path, lambda old, content=content: (old.clear(), old.update(content)))  # type: ignore[misc]
    model, optimizer = trained(1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    try:
        zinf_compile.load(folder, model, optimizer)
    except CheckpointError:
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def test_any_range_and_rectangle_is_read(whole: Path) -> None:
    files = SavedFiles(whole)
    model, _ = trained(0)
    for name, value in model.state_dict().items():
        flat = value.contiguous().reshape(-1)
        assert torch.equal(files.whole(f"model.{name}"), value), name
        for start in range(flat.numel()):
            for end in range(start, flat.numel() + 1, 3):
                into = torch.empty(end - start)
                files.read(f"model.{name}", start, into)
                assert torch.equal(into, flat[start:end]), name
    files.close()
