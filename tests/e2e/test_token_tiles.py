"""MLPs a slice of tokens at a time, in models of transformers and by the memory that a step takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from compute_models import Gpt, allocated_at_most
from marks import more
from torch import nn
from training import BACKEND

import zinf_compile

WIDTH, WORDS, LENGTH = 24, 61, 21


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


class Slices(nn.Module):
    """Eager: the module on slices of the tokens."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.module(part[None])[0] for part in x.flatten(0, 1).split(self.rows)]
        return torch.cat(parts).view_as(x)


def options(rows: int, **others: Any) -> dict[str, Any]:
    return {"compute_shape": {"token_tile": rows * 4 * 4 * WIDTH}, **others}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name.replace(".module", "")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


@pytest.mark.parametrize(("make", "dynamic"), [(gpt2, False), (gpt2, True), (llama, False), more(llama, True)])
def test_models_of_transformers(make: Callable[[], nn.Module], dynamic: bool) -> None:
    """The forward has the bits of slices, the gradients differ by the order of sums alone."""
    rows = 16
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    layers = eager.transformer.h if make is gpt2 else eager.model.layers
    for layer in layers:
        layer.mlp = Slices(layer.mlp, rows)
    model.compile(backend=BACKEND, dynamic=dynamic or None, options=options(rows, compute="fx"))
    for length in (LENGTH, 13, 5)[: 3 if dynamic else 1]:
        words = torch.randint(WORDS, (2, length))
        found, expected = (each(words, labels=words) for each in (model, eager))
        assert torch.equal(found.logits, expected.logits)
        for each in (model, eager):
            each.zero_grad()
        found.loss.backward()
        expected.loss.backward()
        wanted = gradients(eager)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-5 * float(wanted[name].abs().max()))
        with torch.no_grad():
            assert torch.equal(model(words).logits, expected.logits)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 2048), nn.Linear(2048, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("compute", ["fx", "inductor"])
def test_the_memory_of_a_step_is_that_of_a_slice(compute: str) -> None:
    """Three wide values and more are whole in two layers, in slices a part of one."""
    whole, sliced = (held(compute, size) for size in (None, 64))
    activation = 4 * 1024 * 2048
    assert whole > 3 * activation
    assert sliced < activation / 2


def held(compute: str, rows: int | None) -> int:
    torch.compiler.reset()
    zinf_compile.reset()
    model = nn.ModuleDict({"a": Wide(), "b": Wide()})
    chosen = {} if rows is None else {"compute_shape": {"token_tile": rows * 4 * 2048}}
    compiled = torch.compile(lambda x: model["b"](model["a"](x)), backend=BACKEND, options={"compute": compute, **chosen})
    x = torch.randn(1024, 32, requires_grad=True)

    def step() -> None:
        compiled(x).sum().backward()

    step()
    return allocated_at_most(step)


def test_layers_of_inductor_share_slices() -> None:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Gpt()
    eager = copy.deepcopy(model)
    model.compile(backend=BACKEND, options={"compute_shape": {"token_tile": 4 * 256 * 64}})
    words = torch.randint(300, (3, 48))  # two slices, and a third of 16 tokens
    found, expected = (each(words, words) for each in (model, eager))
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    wanted = gradients(eager)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5)
