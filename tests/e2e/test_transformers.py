"""Models of transformers, trained and used on one process: bitwise eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from marks import more
from models import Case
from torch import nn
from training import BACKEND, assert_same, assert_same_models, in_place, train_both, twins
from transformer_models import TRANSFORMERS, WithLoss, Words, causal, gpt2, llama, mixtral, qwen2

from zinf_compile.sharded.parameter import ShardedParameter


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ("gpt2", "llama") else more(n) for n in TRANSFORMERS])
def test_training_is_bitwise_eager(name: str) -> None:
    train_both(TRANSFORMERS[name])


@pytest.mark.slow
@pytest.mark.thorough
def test_experts_in_a_loop_over_the_ones_in_use_are_bitwise_aot_eager() -> None:
    """Dynamo leaves the frames around a loop that depends on data to eager PyTorch; their parameters stay whole.

    Eager adds the gradients of the frames that are compiled in another order.
    """
    case = Case(lambda: WithLoss(mixtral("eager")), causal)
    names = [f"model.model.layers.{layer}.mlp.experts.{part}_proj" for layer in (0, 1) for part in ("gate_up", "down")]
    train_both(
        case, reference=lambda model: torch.compile(model, backend="aot_eager"), whole={"model.model.embed_tokens.weight", *names}
    )


@pytest.mark.parametrize("build", [gpt2, qwen2])
def test_a_saved_pretrained_model_loads_into_eager(build: Callable[[], Any], tmp_path: Path) -> None:
    eager, ours = after_a_backward(build)
    ours.save_pretrained(tmp_path / "ours")
    eager.save_pretrained(tmp_path / "eager")
    assert {p.name: p.stat().st_size for p in (tmp_path / "ours").iterdir()} == {
        p.name: p.stat().st_size for p in (tmp_path / "eager").iterdir()
    }
    loaded = type(ours).from_pretrained(tmp_path / "ours")
    expected = eager.state_dict()
    for name, value in loaded.state_dict().items():
        assert_same(name, expected[name], value)


@pytest.mark.slow
def test_generation_is_eagers_and_training_goes_on() -> None:
    eager, ours = after_a_backward(gpt2)
    words = causal(5)[0]["input_ids"][:, :6]
    sampled = []
    for model in (eager, ours):
        model.eval()
        torch.manual_seed(0)
        sampled.append(
            model.generate(words, attention_mask=torch.ones_like(words), max_new_tokens=5, do_sample=True, pad_token_id=0)
        )
        model.train()
    assert torch.equal(*sampled)
    for model in (eager, ours):
        torch.manual_seed(1)
        model(**causal(1)[0]).loss.backward()
    assert_same_models(eager, ours)


@pytest.mark.slow
def test_gradient_checkpointing() -> None:
    """Bitwise aot_eager: on some processors tracing a checkpoint changes a unit in the last place by itself."""
    eager, ours = after_a_backward(
        llama,
        prepare=lambda model: model.activation_checkpointing_enable(),
        reference=lambda model: model.compile(backend="aot_eager"),
    )
    assert_same_models(eager, ours)


@pytest.mark.slow
def test_the_trainer_trains_evaluates_saves_and_reloads(tmp_path: Path) -> None:
    eager, ours = twins(gpt2)
    in_place(ours)
    histories = [train_with_trainer(model, tmp_path / name) for model, name in ((eager, "eager"), (ours, "ours"))]
    assert histories[0] == histories[1]
    assert sum("eval_loss" in entry for entry in histories[1]) == 3
    assert all(isinstance(parameter, ShardedParameter) for parameter in ours.parameters())
    assert_same_models(eager, ours)
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / "final")
    for name, value in loaded.state_dict().items():
        assert_same(name, eager.state_dict()[name], value)


@pytest.mark.thorough
def test_the_trainer_resumes_a_compiled_run(tmp_path: Path) -> None:
    eager, ours = twins(gpt2)
    in_place(ours)
    for model, name in ((eager, "eager"), (ours, "ours")):
        train_with_trainer(model, tmp_path / name, steps=4)
    again, ours_again = twins(gpt2, seed=1)
    in_place(ours_again)
    for model, name in ((again, "eager"), (ours_again, "ours")):
        train_with_trainer(model, tmp_path / name, steps=8, resume=True)
    assert_same_models(again, ours_again)


def train_with_trainer(model: nn.Module, folder: Path, *, steps: int = 8, resume: bool = False) -> list[dict[str, float]]:
    """Run transformers.Trainer; return its losses and norms as logged."""
    arguments = hf.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=3, per_device_eval_batch_size=5, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4, learning_rate=0.01, warmup_steps=3,
        gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=Words(), eval_dataset=Words())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]


def after_a_backward(
    build: Callable[[], Any],
    *,
    prepare: Callable[[Any], Any] = lambda model: None,
    reference: Callable[[Any], Any] = lambda model: None,
) -> tuple[Any, Any]:
    """Return an eager and a compiled model with the gradients of one batch; `reference` may change how the eager one runs."""
    eager, ours = twins(build)
    ours.compile(backend=BACKEND)
    reference(eager)
    losses = []
    for model in (eager, ours):
        prepare(model)
        torch.manual_seed(0)
        losses.append(model(**causal(0)[0]).loss)
        losses[-1].backward()
    assert_same("loss", *losses)
    return eager, ours
