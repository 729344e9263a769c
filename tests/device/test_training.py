"""Whole training steps on the device, bit for bit those of the CPU, with streams that are late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import late
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel


class _Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(dropout))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.attention(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))


def _loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _steps(
    device: str,
    module: Callable[[], nn.Module],
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[..., torch.Tensor],
    batch: torch.Tensor,
    wrap: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]] = lambda model: model,
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = module().to(device)
    called = wrap(model)
    stepper = optimizer(model.parameters())
    torch.manual_seed(2)
    seen = []
    for _ in range(3):
        value = loss(called, batch.to(device))
        value.backward()
        seen += [value.detach(), *(p.grad.clone() for p in model.parameters())]
        stepper.step()
        stepper.zero_grad()
    return [tensor.cpu() for tensor in [*seen, *model.parameters()]]


def _assert_same(*args, **kwargs) -> None:
    host = _steps("cpu", *args, **kwargs)
    with late.delays(0.0003, seed=7, chance=0.3):
        there = _steps("late", *args, **kwargs)
    assert len(host) == len(there)
    assert all(a.equal(b) for a, b in zip(host, there, strict=True))
    assert not late.defects()
    assert late.counters()["failures on streams"] == 0


TOKENS = torch.arange(24).reshape(2, 12) * 7 % 50
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_transformer_trains_to_the_bits_of_the_cpu(optimizer: str) -> None:
    _assert_same(_Transformer, OPTIMIZERS[optimizer], _loss, TOKENS)


def test_dropout_and_a_compiled_model_train_to_the_bits_of_the_cpu() -> None:
    def compiled(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.compile(model, backend="aot_eager")

    _assert_same(lambda: _Transformer(0.1), OPTIMIZERS["adamw"], _loss, TOKENS)
    _assert_same(lambda: _Transformer(0.1), OPTIMIZERS["adamw"], _loss, TOKENS, wrap=compiled)


def test_convolutions_train_to_the_bits_of_the_cpu() -> None:
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))

    _assert_same(
        images,
        OPTIMIZERS["sgd"],
        lambda model, x: model(x).square().mean(),
        torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8),
    )


def test_gpt2_trains_to_the_bits_of_the_cpu() -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    _assert_same(
        lambda: GPT2LMHeadModel(config), OPTIMIZERS["adamw foreach"], lambda model, x: model(input_ids=x, labels=x).loss, TOKENS
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_type(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 8, device="late"), torch.randn(8, 8, device="late", requires_grad=True)
    with torch.autocast("late", dtype=dtype):
        y = F.linear(x, w)
        assert y.dtype == dtype
        assert y.cpu().equal(F.linear(x.to(dtype), w.to(dtype)).cpu())
        assert F.layer_norm(y, [8]).dtype == torch.float32
        assert F.softmax(y, -1).dtype == torch.float32
        assert torch.addcmul(y, x, x).dtype == torch.float32
        loss = F.mse_loss(y, x)
        assert loss.dtype == torch.float32
    loss.backward()
    assert w.grad.dtype == torch.float32
    assert F.linear(x, w).dtype == torch.float32


def test_a_scaler_skips_what_overflowed() -> None:
    weight = torch.ones(3, device="late", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler = torch.amp.GradScaler("late", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert weight.eq(0).all()
    assert scaler.get_scale() == 2.0


def test_backward_runs_on_a_thread_of_the_device() -> None:
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(threading.current_thread())
            return grad

    Seen.apply(torch.ones(3, device="late", requires_grad=True)).sum().backward()
    assert seen[0] is not threading.current_thread()


def test_backward_runs_on_the_stream_of_the_forward() -> None:
    stream = torch.Stream(device="late")
    weight = torch.ones(10, device="late", requires_grad=True)
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with late.delays(0.001, seed=2):
        with stream:
            loss = (weight * 2).exp().sum()
        torch.accelerator.current_stream().wait_event(stream.record_event())
        loss.backward()
        assert weight.grad.allclose(2 * torch.full((10,), 2.0, device="late").exp())
    assert "aten::exp.out" in [work.name for work in late.log(stream)]
    assert not late.defects()


def test_checkpointed_activations_draw_the_same_numbers() -> None:
    x = torch.ones(50, device="late", requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t * 2, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad.equal(y.detach())
