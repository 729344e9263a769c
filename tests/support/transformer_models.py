"""Tiny models of transformers, made from configurations alone; sizes are uneven where the architecture lets them be."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from models import Case, generator
from torch import nn

WORDS = 61


class WithLoss(nn.Module):
    """Calls a model of transformers with keywords and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs).loss
        return loss


def causal(step: int, rank: int = 0, *, length: int = 13) -> tuple[dict[str, torch.Tensor]]:
    """Return tokens that are their own labels."""
    words = torch.randint(WORDS, (2, length), generator=generator(step, rank))
    return ({"input_ids": words, "labels": words},)


def masked(step: int, rank: int = 0) -> tuple[dict[str, torch.Tensor]]:
    """Return tokens and other tokens as labels, some ignored, the second row padded."""
    numbers = generator(step, rank)
    words, labels = torch.randint(WORDS, (2, 2, 13), generator=numbers)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 9:] = 0
    return ({"input_ids": words, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)},)


def pictures(step: int, rank: int = 0) -> tuple[dict[str, torch.Tensor]]:
    """Return pictures and their classes."""
    numbers = generator(step, rank)
    return ({"pixel_values": torch.randn(2, 3, 12, 12, generator=numbers), "labels": torch.tensor([1, 3])},)


LLAMA: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama() -> nn.Module:
    """Llama with grouped queries."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))


def qwen2() -> nn.Module:
    """Qwen2 with its head tied to its embedding."""
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA, tie_word_embeddings=True))


def mixtral(experts: str) -> nn.Module:
    """Mixtral with three experts, two at a time; its grouped products want rows of whole 16 bytes."""
    sizes = {**LLAMA, "intermediate_size": 40}  # in bf16, too
    config = hf.MixtralConfig(**sizes, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True)
    config._experts_implementation = experts
    return hf.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    """GPT-2 with its dropout."""
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=21, n_layer=2, n_head=3, n_positions=64, bos_token_id=1, eos_token_id=2)
    return hf.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """BERT with its masked-word head and dropout."""
    config = hf.BertConfig(
        vocab_size=WORDS, hidden_size=21, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37,
        max_position_embeddings=64,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def t5(*, use_cache: bool = True) -> nn.Module:
    """T5: encoder, decoder and one embedding for both. Where `use_cache` copies a config PyTorch 2.11 breaks the graph."""
    config = hf.T5Config(
        vocab_size=WORDS, d_model=21, d_kv=7, d_ff=37, num_layers=2, num_heads=3, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=2, use_cache=use_cache,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """ViT on pictures of 12 x 12."""
    config = hf.ViTConfig(
        hidden_size=21,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=37,
        image_size=12,
        patch_size=4,
        num_labels=5,
    )
    return hf.ViTForImageClassification(config)


TRANSFORMERS: dict[str, Case] = {
    "llama": Case(lambda: WithLoss(llama()), causal),
    "qwen2": Case(lambda: WithLoss(qwen2()), causal),
    "gpt2": Case(lambda: WithLoss(gpt2()), causal),
    "bert": Case(lambda: WithLoss(bert()), masked),
    "t5": Case(lambda: WithLoss(t5()), masked),
    "mixtral": Case(lambda: WithLoss(mixtral("grouped_mm")), causal),
    "vit": Case(lambda: WithLoss(vit()), pictures),
}


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A few rows of tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[0] for name, rows in causal(index)[0].items()}
