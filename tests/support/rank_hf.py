"""Trainer and accelerate on several ranks: beside DDP, and resumed from what they saved."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from safetensors.torch import load_file
from same_leaves import assert_equal
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import UnsupportedModelError, ZinfError
from zinf_compile.hf.states_beside import named_by
from zinf_compile.sharded.parameter import ShardedParameter

WORDS = 29
PARAMETERS = 5
"""Of `Tiny`."""


def as_under_torchrun(world: int) -> None:
    """Set what torchrun sets, which accelerate reads; what the libraries warn of is theirs."""
    warnings.simplefilter("default")
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(world))


class TinyConfig(hf.PreTrainedConfig):
    """Of `Tiny`."""

    model_type = "tiny_of_zinf_tests"


class Tiny(hf.PreTrainedModel):
    """A language model of three layers with dropout and uneven sizes: traced in a moment, saved and loaded as any."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed, self.drop = nn.Embedding(WORDS, 7), nn.Dropout(0.1)
        self.inner, self.head = nn.Linear(7, 5), nn.Linear(5, WORDS)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.inner(self.drop(self.embed(input_ids)))))
        loss = nn.functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="sum")
        return {"loss": loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch), "logits": logits}


def tiny(seed: int) -> Tiny:
    """Return a model; a seed gives all the same."""
    torch.manual_seed(seed)
    return Tiny(TinyConfig())


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, every third with fewer that count."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(WORDS, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.masked_fill(torch.arange(8) % 3 == 0, -100) if index % 3 == 0 else words}


def trainer_of(model: nn.Module, folder: str) -> hf.Trainer:
    """Return a trainer that accumulates, clips, evaluates, saves every second step, and at the end loads the one of most loss."""
    arguments = hf.TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        greater_is_better=True, metric_for_best_model="loss",
        learning_rate=0.01, max_grad_norm=0.5, optim="adamw_torch_fused", use_cpu=True, report_to=[], disable_tqdm=True,
        seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    return hf.Trainer(model=model, args=arguments, train_dataset=Words(), eval_dataset=Words())


def _compiled(seed: int, options: dict[str, Any] | None) -> nn.Module:
    """Return a model compiled in place; with options, partitioned ahead, as one that fits nowhere whole is."""
    with contextlib.nullcontext() if options is None else zinf_compile.partitioned(**options):
        model = tiny(seed)
    model.compile(backend=BACKEND, options={})
    return model


def _logged(trainer: hf.Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]


def _states(trainer: hf.Trainer) -> Any:
    """Return whole optimizer states, on rank 0."""
    return zinf_compile.full_optimizer_state_dict(trainer.optimizer.optimizer).get("state")


def check_states_beside(file: Path, *, on_drives: bool) -> None:
    """Check that states on drives, which fit into no memory, went to a folder, and that the file has nothing but their name."""
    assert file.with_suffix("").is_dir() == on_drives
    assert (named_by(file) is not None) == on_drives
    if on_drives:
        assert file.stat().st_size < 2000
        (states,) = file.with_suffix("").iterdir()
        assert sum("exp_avg" in key for key in json.loads((states / "manifest.json").read_text())["tensors"]) == 2 * PARAMETERS


def trained_and_resumed(rank: int, world: int, folder: str, options: dict[str, Any] | None) -> None:
    """Train four steps beside DDP, and from the checkpoint of the second again. What is loaded as best is the second's, too."""
    as_under_torchrun(world)
    runs = []
    for seed, resume in ((0, None), (1, f"{folder}/run/checkpoint-2")):
        torch.compiler.reset()
        trainer = zinf_compile.hf.adopt(
            trainer_of(_compiled(seed, options), f"{folder}/run" if resume is None else f"{folder}/again")
        )
        assert zinf_compile.hf.adopt(trainer) is trainer
        trainer.train(resume_from_checkpoint=resume)
        assert all(isinstance(p, ShardedParameter) for p in trainer.model.parameters())
        runs.append((_logged(trainer), _states(trainer), zinf_compile.full_state_dict(trainer.model)))
    (history, states, weights), (continued, again, reloaded) = runs
    assert continued == history  # of which the first half comes from the checkpoint
    if rank == 0:
        torch.testing.assert_close(states, again, rtol=0, atol=0)
        best = Tiny.from_pretrained(f"{folder}/run/checkpoint-2").state_dict()
        for found in (weights, reloaded):
            torch.testing.assert_close(dict(best), found, rtol=0, atol=0)
        ends = [load_file(f"{folder}/{run}/checkpoint-4/model.safetensors") for run in ("run", "again")]
        torch.testing.assert_close(*ends, rtol=0, atol=0)
        assert not torch.equal(ends[0]["embed.weight"], best["embed.weight"])
        files = {path.name for path in Path(folder, "run", "checkpoint-4").iterdir()}
        generators = "rng_state_1.pth" if world > 1 else "rng_state.pth"
        assert {"config.json", "training_args.bin", "optimizer.pt", "scheduler.pt", generators} <= files, files
        check_states_beside(Path(folder, "run", "checkpoint-4", "optimizer.pt"), on_drives=options is not None)
    if options is None:
        reference = trainer_of(tiny(0), f"{folder}/ddp")
        reference.train()
        assert isinstance(reference.model_wrapped, nn.parallel.DistributedDataParallel)
        for ours, theirs in zip(history, _logged(reference), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def _steps(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        words = _batch(accelerator.process_index, step)
        loss = model(input_ids=words, labels=words)["loss"]
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return norms


def _prepared(accelerator: Accelerator, model: nn.Module) -> tuple[Any, Any, Any]:
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    prepared: Any = accelerator.prepare(model, optimizer, scheduler)
    return prepared


def bare_accelerator(rank: int, world: int, folder: str, options: dict[str, Any] | None) -> None:
    """Train beside DDP, save, go on; load and go on again, in the same objects and in new ones."""
    as_under_torchrun(world)
    accelerator = zinf_compile.hf.adopt(Accelerator(cpu=True))
    assert isinstance(accelerator, Accelerator)
    model = _compiled(0, options)
    prepared = _prepared(accelerator, model)
    assert accelerator.unwrap_model(prepared[0]) is model
    norms = _steps(accelerator, *prepared, range(2))
    accelerator.save_state(f"{folder}/state")
    check_states_beside(Path(folder, "state", "optimizer.bin"), on_drives=options is not None)
    after = _steps(accelerator, *prepared, range(2, 4)), accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/model")
    accelerator.load_state(f"{folder}/state")
    again = _steps(accelerator, *prepared, range(2, 4)), accelerator.get_state_dict(model)
    accelerator.free_memory()
    torch.compiler.reset()
    other = _compiled(1, options)
    new = _prepared(accelerator, other)
    accelerator.load_state(f"{folder}/state")
    anew = _steps(accelerator, *new, range(2, 4)), accelerator.get_state_dict(other)
    assert (after[1] == {}) == (rank != 0)
    torch.testing.assert_close(after, again, rtol=0, atol=0)
    torch.testing.assert_close(after, anew, rtol=0, atol=0)
    if rank == 0:
        torch.testing.assert_close(load_file(f"{folder}/model/model.safetensors"), after[1])
    if options is None:
        plain = Accelerator(cpu=True)
        ddp = _prepared(plain, tiny(0))
        assert isinstance(ddp[0], nn.parallel.DistributedDataParallel)
        assert _steps(plain, *ddp, range(2)) == pytest.approx(norms, rel=1e-4)
        wrapped = plain.prepare(_compiled(0, None))
        with pytest.raises(UnsupportedModelError, match=r"accelerate.*zinf_compile\.hf\.adopt\(accelerator\)"):
            wrapped(input_ids=_batch(rank, 0), labels=_batch(rank, 0))
        with pytest.raises(ZinfError, match=r"zinf_compile\.hf\.adopt"):
            nn.parallel.DistributedDataParallel(model)


def stopped_between(rank: int, world: int, folder: str, options: dict[str, Any]) -> None:
    """Let rank 0 fail between states and the file that names them: the file's own are loaded, and the others go.

    Then save states in memory to the same path, and leave those of the first save there, as an earlier program has.
    """
    as_under_torchrun(world)
    accelerator = zinf_compile.hf.adopt(Accelerator(cpu=True))
    model = _compiled(0, options)
    prepared = _prepared(accelerator, model)
    file = Path(folder, "state", "optimizer.bin")
    states, whole = file.with_suffix(""), []
    for steps in (range(1), range(1, 2)):
        _steps(accelerator, *prepared, steps)
        stopping = mock.patch.object(os, "rename", _refusing(file, os.rename)) if steps[0] and rank == 0 else None
        with stopping or contextlib.nullcontext(), pytest.raises((OSError, ZinfError)) if steps[0] else contextlib.nullcontext():
            accelerator.save_state(file.parent)
        whole.append(zinf_compile.full_optimizer_state_dict(prepared[1].optimizer).get("state"))
    names = [path.name for path in sorted(states.iterdir())]
    assert names == ["save-00000001", "save-00000002"]
    accelerator.load_state(file.parent)
    assert_equal(zinf_compile.full_optimizer_state_dict(prepared[1].optimizer).get("state"), whole[0])
    accelerator.save_state(file.parent)
    assert [path.name for path in states.iterdir()] == ["save-00000002"]
    stale = shutil.copytree(states, f"{folder}/stale-{rank}")

    accelerator.free_memory()
    torch.compiler.reset()
    in_memory = _compiled(1, None)
    new = _prepared(accelerator, in_memory)
    _steps(accelerator, *new, range(3))
    expected = zinf_compile.full_optimizer_state_dict(new[1].optimizer).get("state")
    accelerator.save_state(file.parent)
    assert not states.exists()
    accelerator.wait_for_everyone()
    if rank == 0:
        shutil.copytree(stale, states)
    _steps(accelerator, *new, range(3, 4))
    accelerator.load_state(file.parent)
    assert_equal(zinf_compile.full_optimizer_state_dict(new[1].optimizer).get("state"), expected)


def _refusing(file: Path, really: Callable[..., None]) -> Callable[..., None]:
    """Return what renames anything but what would become that file."""

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if Path(target) == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(source, target, **kwargs)

    return rename
