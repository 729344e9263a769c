"""A sequence-to-sequence trainer that generates where it evaluates, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from rank_hf import WORDS, Words, as_under_torchrun
from training import BACKEND

import zinf_compile

STEPS = 4
SHORTEST, LONGEST = 3, 6
"""Tokens that a rank's sequences have, with the first: rank 0's are the shortest."""


def _model() -> hf.T5ForConditionalGeneration:
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


class _EndsAt(hf.LogitsProcessor):  # type: ignore[misc]
    """Ends each sequence at a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] + 1 < self._length:
            return scores.index_fill(1, torch.tensor([1]), -torch.inf)
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([1]), 0.0)


def _tokens(prediction: hf.EvalPrediction) -> dict[str, float]:
    return {"tokens": float((prediction.predictions != 0).sum())}


def _trainer(model: Any, folder: str, *, evaluates: bool) -> hf.Seq2SeqTrainer:
    arguments = hf.Seq2SeqTrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=3, logging_steps=1,
        eval_strategy="steps" if evaluates else "no", eval_steps=2, save_strategy="no", predict_with_generate=True,
        generation_max_length=LONGEST, learning_rate=0.01, optim="adamw_torch_fused", use_cpu=True, report_to=[],
        disable_tqdm=True, seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    metrics = _tokens if evaluates else None  # without them an evaluation generates nothing
    return hf.Seq2SeqTrainer(model=model, args=arguments, train_dataset=Words(), eval_dataset=Words(), compute_metrics=metrics)


def generated_while_training(rank: int, world: int, folder: str, options: dict[str, Any]) -> None:
    """Evaluate before, between and after steps as a plain model with the same values does; training goes as without."""
    as_under_torchrun(world)
    losses = []
    for evaluates in (False, True):
        torch.compiler.reset()
        model = _model()
        model.compile(backend=BACKEND, options=options)
        trainer = zinf_compile.hf.adopt(_trainer(model, folder, evaluates=evaluates))
        found = trainer.evaluate()  # before the first step, with nothing partitioned yet
        assert ("eval_tokens" in found) == evaluates
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert sum("eval_tokens" in entry for entry in trainer.state.log_history) == STEPS // 2

    ends = _EndsAt(SHORTEST if rank == 0 else LONGEST)
    ours = trainer.predict(Words(), logits_processor=hf.LogitsProcessorList([ends]))
    state = zinf_compile.full_state_dict(model)
    if rank == 0:
        plain = _model().eval()
        plain.load_state_dict(state)
        rows = [Words()[index] for index in range(len(Words()))]
        inputs, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
        whole = plain.generate(inputs, max_length=LONGEST, logits_processor=hf.LogitsProcessorList([_EndsAt(LONGEST)]))
        found = torch.from_numpy(ours.predictions)[:, :LONGEST]  # which the trainer pads further
        short = (found[:, SHORTEST - 1] == 1) & (found[:, SHORTEST:] == 0).all(dim=1)
        assert short.sum() == len(rows) // world
        assert torch.equal(found[~short], whole[~short])
        assert torch.equal(found[short, : SHORTEST - 1], whole[short, : SHORTEST - 1])
        torch.testing.assert_close(ours.metrics["test_loss"], _mean_loss(plain, inputs, labels), rtol=1e-5, atol=0)


@torch.no_grad()
def _mean_loss(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean of the losses of the trainer's batches: of every three rows, by whichever rank."""
    pairs = zip(inputs.split(3), labels.split(3), strict=True)
    return float(torch.stack([model(input_ids=words, labels=targets).loss for words, targets in pairs]).mean())
