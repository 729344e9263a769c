"""Models loaded from safetensors into shards, tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from rank_from_meta import built_whole, compare
from safetensors.torch import save_file
from torch import nn
from training import assert_same
from transformer_models import bert, gpt2, llama, qwen2, t5

import zinf_compile
from zinf_compile.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def saved(model: nn.Module, path: Path, **changes: torch.Tensor | None) -> Path:
    """Save a model's state, tied weights once, with some tensors changed, added or (None) left out."""
    state = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in model.state_dict().items()}
    for name, value in changes.items():
        state.pop(name.replace("__", "."), None)
        if value is not None:
            state[name.replace("__", ".")] = value
    save_file(state, path)
    return path


@pytest.mark.parametrize("build", [gpt2, llama, qwen2, bert, t5])
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_folder_that_transformers_saved(build: Callable[[], Any], tier: str, tmp_path: Path) -> None:
    whole = built_whole(build)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, random = on_meta(build), torch.get_rng_state()
    away = {"params": "nvme", "nvme": tmp_path, "compute_shape": {"piece_numel": 300}} if tier == "nvme" else {}
    zinf_compile.partition(ours, checkpoint=tmp_path, **away)
    compare(whole, ours)
    for name, buffer in whole.named_buffers():  # those that aren't saved too
        assert_same(name, buffer, ours.get_buffer(name))
    assert torch.equal(torch.get_rng_state(), random), "nothing was drawn in vain"


@pytest.mark.parametrize("name", ["tied", "odd_shapes", "mutated_buffers"])
@pytest.mark.parametrize("kind", ["file", "folder", "index"])
def test_a_file_of_a_plain_model(name: str, kind: str, tmp_path: Path) -> None:
    whole = built_whole(CASES[name].build)
    drop = {"head__weight": None} if name == "tied" else {}
    file = saved(whole, tmp_path / "model.safetensors", **drop)  # type: ignore[arg-type]
    index = tmp_path / "model.safetensors.index.json"
    if kind == "index":
        names = list(whole.state_dict().keys() - {"head.weight"})
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file.name)}))
    ours = on_meta(CASES[name].build)
    path = {"file": file, "folder": tmp_path, "index": index}[kind]
    if name == "mutated_buffers":  # one of its buffers isn't saved and has no initialiser
        with pytest.raises(zinf_compile.UnsupportedModelError, match="no initialiser gave count a value; the model is on meta"):
            zinf_compile.partition(ours, checkpoint=path)
        ours.count = torch.zeros((), dtype=torch.long)
    zinf_compile.partition(ours, checkpoint=path)
    compare(whole, ours)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    build = CASES["mlp"].build
    file = saved(
        build(),
        tmp_path / "odd.safetensors",
        first__weight=None,
        first__bias=torch.zeros(13, dtype=torch.bfloat16),
        second__weight=torch.zeros(3, 13),
        more=torch.zeros(2),
    )
    problems = [
        r"missing: first\.weight",
        r"unexpected: more",
        r"type of first\.bias: torch\.bfloat16 in the checkpoint, torch\.float32 in the model",
        r"shape of second\.weight: \[3, 13\] in the checkpoint, \[5, 13\] in the model",
    ]
    assert_refused(build, file, "".join(f"(?=.*{problem})" for problem in problems))


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    build = CASES["mlp"].build
    file = saved(build(), tmp_path / "cut.safetensors")
    whole = file.read_bytes()
    for size, message in (
        (
            len(whole) - 4,
            r"cut.safetensors is damaged or .*: second\.weight ends at byte [\d,]+ of [\d,]+",
        ),
        (40, "not a complete safetensors file: its header would have"),
        (3, "not a complete safetensors file"),
        (0, "not a complete safetensors file"),
    ):
        file.write_bytes(whole[:size])
        assert_refused(build, file, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x10\0\0\0\0\0\0\0" + b"not JSON at all.", "its header is not JSON"),
        (b"\x04\0\0\0\0\0\0\0" + b"[1] ", "its header is a list"),
        (b"\x08\0\0\0\0\0\0\0" + b'{"a":3} ', "a has no dtype, shape and data_offsets"),
    ],
)
def test_other_files(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(content)
    assert_refused(CASES["mlp"].build, file, message)


def test_a_size_that_is_not_the_shapes(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert_refused(CASES["mlp"].build, file, r"a, \[3\] F32, has 8 bytes")


def test_folders_and_indices_that_are_not_whole(tmp_path: Path) -> None:
    build = CASES["mlp"].build
    assert_refused(build, tmp_path, "holds 0 files .* accepted: a folder with an index")
    assert_refused(build, tmp_path / "nowhere.safetensors", "cannot open .*: No such file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}}')
    assert_refused(build, tmp_path, "is no index of safetensors files .*weight_map")
    index.write_text(json.dumps({"weight_map": {"first.weight": "a.safetensors", "first.bias": "b.safetensors"}}))
    assert_refused(build, tmp_path, r"names files that are missing: .*a\.safetensors, .*b\.safetensors")
    saved(build(), tmp_path / "a.safetensors", first__bias=None)
    index.write_text(json.dumps({"weight_map": {"first.weight": "a.safetensors", "first.bias": "a.safetensors"}}))
    assert_refused(build, tmp_path, r"a\.safetensors .*: first\.bias is missing, which the index says is in it")


def test_of_tied_weights_saved_twice_the_last_counts_as_it_does_in_eager(tmp_path: Path) -> None:
    whole = built_whole(CASES["tied"].build)
    file = saved(whole, tmp_path / "model.safetensors", head__weight=torch.ones_like(whole.head.weight))
    ours = zinf_compile.partition(on_meta(CASES["tied"].build), checkpoint=file)
    assert bool((zinf_compile.full_state_dict(ours)["embedding.weight"] == 1).all())


def assert_refused(build: Callable[[], nn.Module], path: Path, message: str) -> None:
    """The model is on meta as before, and can still be partitioned."""
    model = on_meta(build)
    before = list(model.parameters())
    with pytest.raises(CheckpointError, match=message):
        zinf_compile.partition(model, checkpoint=path)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert {(type(p), p.device.type) for p in before} == {(nn.Parameter, "meta")}
    zinf_compile.partition(model)
