"""Models saved as safetensors: what plain PyTorch and transformers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from models import MutatedBuffers, TiedWords, tokens, vectors
from rank_save import save_on_ranks
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from training import BACKEND, adamw, assert_same, assert_same_models, plain_step, twins
from transformer_models import LLAMA, causal

import zinf_compile
from zinf_compile.checkpoint import save_safetensors
from zinf_compile.checkpoint.save_safetensors import plan_files
from zinf_compile.errors import OptionError


def trained(build: Any, batch: Any, *, reference: str | None = None) -> tuple[nn.Module, nn.Module]:
    """Return an eager model, or one compiled with the backend `reference`, and its compiled twin after a step."""
    eager, ours = twins(build)
    if reference is not None:
        eager.compile(backend=reference)
    ours.compile(backend=BACKEND)
    for model in (eager, ours):
        plain_step(model, adamw(model.parameters()), batch)
    return eager, ours


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("file_bytes", ["1GiB", 1000, 1])
def test_a_plain_model_loads_it(file_bytes: int | str, tmp_path: Path) -> None:
    eager, ours = trained(TiedWords, tokens(0))
    files = zinf_compile.save_safetensors(ours, tmp_path / "new" / "folder", file_bytes=file_bytes)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.glob("*.safetensors")) == files
    assert len(files) == 1 if file_bytes == "1GiB" else len(files) > 2
    assert (folder / save_safetensors.INDEX).exists() == (len(files) > 1)
    state = read(folder)
    again = TiedWords()
    missing, unexpected = again.load_state_dict(state, strict=False)
    assert (len(missing), unexpected) == (1, []), "the tied weight is there once"
    assert_same_models(eager.zero_grad() or eager, again)


def test_buffers_are_saved(tmp_path: Path) -> None:
    eager, ours = trained(MutatedBuffers, vectors(0))
    zinf_compile.save_safetensors(ours, tmp_path)
    state = read(tmp_path)
    for name, value in eager.state_dict().items():
        assert_same(name, value, state[name])


def test_transformers_loads_it(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**{**LLAMA, "tie_word_embeddings": True})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hf.LlamaForCausalLM(config)

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**inputs).loss
            return loss

    eager, ours = trained(Model, causal(0), reference="aot_eager")  # which runs the same kernels
    assert isinstance(ours, Model)
    zinf_compile.save_safetensors(ours.model, tmp_path, file_bytes="4KiB")
    config.save_pretrained(tmp_path)
    assert_same_models(eager.model.zero_grad() or eager.model, hf.LlamaForCausalLM.from_pretrained(tmp_path))  # type: ignore[operator,union-attr]


def test_another_layout_replaces_the_old_one(tmp_path: Path) -> None:
    _, ours = trained(TiedWords, tokens(0))
    zinf_compile.save_safetensors(ours, tmp_path, file_bytes=1000)
    (tmp_path / "model_ema.safetensors").write_bytes(b"somebody else's")
    assert zinf_compile.save_safetensors(ours, tmp_path) == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "model_ema.safetensors"]


def test_a_failure_leaves_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = trained(TiedWords, tokens(0))
    zinf_compile.save_safetensors(ours, tmp_path, file_bytes=1000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    really = save_safetensors.save_file
    answers = iter([True])

    def broken(*args: Any, **kwargs: Any) -> None:
        if not next(answers, False):
            raise OSError("no space left")
        really(*args, **kwargs)

    monkeypatch.setattr(save_safetensors, "save_file", broken)
    with pytest.raises(OSError, match="no space left"):
        zinf_compile.save_safetensors(ours, tmp_path, file_bytes=1500)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_are_filled_in_order() -> None:
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in {"a": 5, "b": 4, "c": 20, "d": 1}.items()}
    assert plan_files(tensors, 10) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
    assert plan_files({}, 10) == {"model.safetensors": []}


def test_a_size_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="file_bytes"):
        zinf_compile.save_safetensors(TiedWords(), tmp_path, file_bytes="much")


@pytest.mark.distributed
@pytest.mark.slow
def test_on_ranks(tmp_path: Path) -> None:
    (files, said), (others, told) = run_ranks(save_on_ranks, 2, str(tmp_path))
    assert files == others
    assert said == "no space left"
    assert "failed on rank 0, see there" in told
    index = json.loads((tmp_path / save_safetensors.INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert read(tmp_path).keys() == index["weight_map"].keys()
