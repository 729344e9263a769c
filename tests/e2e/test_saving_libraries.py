"""Savers of other libraries, which call `state_dict()` and nothing else, with everything on NVMe."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from lightning_nets import net_type
from marks import more
from safetensors.torch import load_file
from tiers import Sundry, options_for, words
from torch import nn
from training import BACKEND, adamw, assert_same, twins
from transformer_models import Words, causal, gpt2, llama, qwen2

import zinf_compile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
]


def on_nvme(model: Any, folder: Path) -> Any:
    """Compile in place."""
    model.compile(backend=BACKEND, options=options_for(("nvme", "nvme", "nvme"), folder))
    return model


def step(model: Any) -> None:
    """Train one step, most of which is deferred."""
    torch.manual_seed(0)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model(**causal(0)[0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_read(model: nn.Module) -> int:
    """Return what came from drives so far, once nothing moves."""
    zinf_compile.synchronize()
    count: int = zinf_compile.stats(model)["links"]["nvme to host"]["bytes"]
    return count


def assert_state(expected: nn.Module, found: dict[str, torch.Tensor]) -> None:
    """Compare with an eager model's."""
    state = expected.state_dict()
    assert state.keys() == found.keys()
    for name, value in state.items():
        assert_same(name, value, found[name])


@pytest.mark.parametrize("build", [gpt2, more(qwen2)])
def test_save_pretrained_the_trainer_and_accelerate(build: Any, tmp_path: Path) -> None:
    """Plain transformers loads what they write; tied weights are written once, and each parameter is read once."""
    accelerate = pytest.importorskip("accelerate")
    eager, ours = twins(build)
    on_nvme(ours, tmp_path)
    for model in (eager, ours):
        step(model)
    before = bytes_read(ours)
    ours.save_pretrained(tmp_path / "ours")
    assert bytes_read(ours) - before == sum(p.nbytes for p in ours.parameters())
    eager.save_pretrained(tmp_path / "eager")
    assert _sizes(tmp_path / "ours") == _sizes(tmp_path / "eager")
    arguments = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False)
    hf.Trainer(model=ours, args=arguments, train_dataset=Words()).save_model(str(tmp_path / "trainer"))
    for name in ("ours", "trainer"):
        assert_state(eager, type(eager).from_pretrained(tmp_path / name).state_dict())
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare_model(ours) is ours
    accelerator.save_model(ours, str(tmp_path / "accelerate"))
    state = load_file(tmp_path / "accelerate" / "model.safetensors")
    again = copy.deepcopy(eager).apply(_forget)
    again.load_state_dict(state, strict=False)
    again.tie_weights()
    assert_state(eager, again.state_dict())
    for safe in (True, False):
        folder = str(tmp_path / f"safe {safe}")
        accelerator.save_state(folder, safe_serialization=safe)
        with torch.no_grad():
            for value in ours.state_dict().values():
                value.zero_()
        accelerator.load_state(folder)
        assert_state(eager, ours.state_dict())


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _forget(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.zero_()


@pytest.mark.parametrize("safe", [True, False])
def test_an_adopted_accelerator_writes_the_format_that_is_asked_for(safe: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    _, ours = twins(gpt2)
    on_nvme(ours, tmp_path)
    step(ours)
    accelerator = zinf_compile.hf.adopt(accelerate.Accelerator(cpu=True))
    assert accelerator.prepare_model(ours) is ours
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    folder = tmp_path / "saved"
    accelerator.save_state(str(folder), safe_serialization=safe)
    assert (folder / "model.safetensors").exists() == safe
    assert (folder / "pytorch_model.bin").exists() != safe
    with torch.no_grad():
        for value in ours.state_dict().values():
            value.zero_()
    accelerator.load_state(str(folder))
    for name, value in ours.state_dict().items():
        assert_same(name, before[name], value)


@pytest.mark.filterwarnings("ignore:.*:Warning")  # what peft imports
def test_peft_reads_the_adapters_and_nothing_else(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(llama(), settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        return model

    eager, ours = twins(build)
    on_nvme(ours, tmp_path)
    for model in (eager, ours):
        step(model)
    adapters = sum(p.nbytes for name, p in ours.named_parameters() if "lora_" in name)
    before = bytes_read(ours)
    ours.save_pretrained(tmp_path / "ours")
    assert bytes_read(ours) - before == adapters < sum(p.nbytes for p in ours.parameters()) / 20
    eager.save_pretrained(tmp_path / "eager")
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "eager"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(name, value, found[name])


@pytest.mark.filterwarnings("ignore:.*:Warning")  # Lightning's advice
@pytest.mark.parametrize("adopted", [False, True])
def test_lightning_saves_and_resumes(adopted: bool, lightning: Any, tmp_path: Path) -> None:
    """`adopted`: without the states of the optimizer in memory."""
    loader = torch.utils.data.DataLoader([words(step, 0) for step in range(5)], batch_size=None)
    wrapped = net_type(lightning)

    def fit(module: Any, folder: Path, steps: int, resume: Path | None = None) -> Any:
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", enable_checkpointing=True, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        if adopted and module.net._compiled_call_impl is not None:
            assert zinf_compile.hf.adopt(trainer) is trainer
        trainer.fit(module, loader, ckpt_path=resume)
        return trainer

    def net() -> nn.Module:
        """Return a compiled one that is partitioned before `fit`, whose first step is one with a closure."""
        torch.compiler.reset()
        model = on_nvme(Sundry(), tmp_path)
        model(words(0, 0)).backward()
        model.zero_grad()
        return model  # type: ignore[no-any-return]

    torch.manual_seed(3)
    eager = wrapped(Sundry())
    ours = wrapped(net())
    ours.load_state_dict(eager.state_dict())
    trainers = [fit(module, tmp_path / name, 3) for module, name in ((eager, "eager"), (ours, "ours"))]
    trainers[1].save_checkpoint(tmp_path / "last.ckpt")
    automatic = next((tmp_path / "ours" / "checkpoints").glob("*.ckpt"))
    for path in (automatic, tmp_path / "last.ckpt"):
        assert_state(eager, torch.load(path, weights_only=False)["state_dict"])
        assert Path(f"{path}.states").is_dir() == adopted
    kept = torch.load(tmp_path / "last.ckpt", weights_only=False)["optimizer_states"]
    assert (kept == [{}]) == adopted
    resumed = wrapped(net())
    fit(resumed, tmp_path / "again", 5, tmp_path / "last.ckpt")
    fit(eager, tmp_path / "more", 5, next((tmp_path / "eager" / "checkpoints").iterdir()))
    assert_state(eager, resumed.state_dict())
    if adopted:
        trainers[1].strategy.remove_checkpoint(tmp_path / "last.ckpt")
        assert not Path(f"{tmp_path}/last.ckpt.states").exists()
