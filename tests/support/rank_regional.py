"""Blocks compiled one by one, on several ranks: what nobody compiled stays whole, its states don't."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rank_unpartitioned import Stack
from torch import nn
from torch.optim import Optimizer
from training import BACKEND

import zinf_compile
from zinf_compile.optim.state_layout import LAYOUT
from zinf_compile.sharded.parameter import ShardedParameter

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def build(options: dict[str, Any]) -> Stack:
    """Return the model with its blocks compiled one by one; a seed gives all the same."""
    torch.manual_seed(5)
    model = Stack(broken=False)
    for block in model.blocks:
        block.compile(backend=BACKEND, options=options)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss of this rank's own batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    out: torch.Tensor = model(torch.randint(11, (4, 3), generator=generator)).square().sum()
    return out


def train(model: Stack, optimizer: Optimizer, rank: int, steps: range, shadow: Optimizer | None = None) -> list[float]:
    """Train; return the norms of the clipped gradients. `shadow` updates copies of what is whole by the same gradients."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if shadow is not None:
            for copied, parameter in zip(shadow.param_groups[0]["params"], whole_of(model), strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.clone()
            shadow.step()
        optimizer.step()
    return norms


def train_eager(model: nn.Module, optimizer: Optimizer, world: int, steps: range) -> list[float]:
    """Train the same by eager PyTorch on the mean of all ranks' gradients."""
    norms = []
    for step in steps:
        by_rank = [torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())) for rank in range(world)]
        for parameter, *grads in zip(model.parameters(), *by_rank, strict=True):
            parameter.grad = sum(grads[1:], grads[0].clone()) / world
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms


def whole_of(model: Stack) -> list[nn.Parameter]:
    """Return what no graph uses."""
    return [model.embedding.weight, model.head.weight, model.head.bias]


def states_are_split(rank: int, world: int, name: str, options: dict[str, Any]) -> list[str]:
    """Train beside eager, save and load in both ways, train on; return what was wrong."""
    model, wrong = build(options), []
    eager = copy.deepcopy(model)
    make = OPTIMIZERS[name]
    optimizer, expected = make(model.parameters()), make(eager.parameters())
    unsplit = make([nn.Parameter(p.detach().clone()) for p in whole_of(model)])
    norms = train(model, optimizer, rank, range(2), unsplit), train_eager(eager, expected, world, range(2))
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for parameter, copied in zip(whole_of(model), unsplit.param_groups[0]["params"], strict=True):
        state = optimizer.state[parameter]
        if not torch.equal(parameter, copied):
            wrong.append(f"bits of {list(parameter.shape)}")
        large = [v.numel() for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim()]
        if not large or {*large} != {-(-parameter.numel() // (64 * world)) * 64} or LAYOUT not in state:
            wrong.append(f"states of {list(parameter.shape)} are {large}")
    own = copy.deepcopy(optimizer.state_dict())
    full = zinf_compile.full_optimizer_state_dict(optimizer)
    weights = zinf_compile.full_state_dict(model)
    if rank == 0:
        assert_same_shapes(expected.state_dict(), full)
        numbers = [0, len(list(model.parameters())) - 2, len(list(model.parameters())) - 1]
        for number, copied in zip(numbers, unsplit.state.values(), strict=True):
            for what, value in copied.items():
                if not torch.equal(full["state"][number][what], value):
                    wrong.append(f"whole state {what} of parameter {number}")
    train(model, optimizer, rank, range(2, 4))
    after = zinf_compile.full_state_dict(model)
    shared: list[Any] = [full]
    torch.distributed.broadcast_object_list(shared)
    ways: dict[str, Callable[[], None]] = {
        "whole, spread": lambda: zinf_compile.load_full_optimizer_state_dict(optimizer, full if rank == 0 else None),
        "its own": lambda: optimizer.load_state_dict(copy.deepcopy(own)),
        "whole, on each rank": lambda: optimizer.load_state_dict(copy.deepcopy(shared[0])),
    }
    for way, load in ways.items():
        zinf_compile.load_full_state_dict(model, weights if rank == 0 else None)
        load()
        train(model, optimizer, rank, range(2, 4))
        again = zinf_compile.full_state_dict(model)
        wrong += [f"{key} after loading {way}" for key, value in again.items() if not torch.equal(value, after[key])]
    return wrong


def assert_same_shapes(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare states' names and shapes with eager's."""
    shapes = [
        {key: {n: getattr(v, "shape", v) for n, v in entry.items()} for key, entry in each["state"].items()}
        for each in (expected, found)
    ]
    assert shapes[0] == shapes[1]


def said_at_the_first_step(rank: int, world: int) -> tuple[str, str, int]:
    """Return what is logged of a model of which much is whole, and of one of which little is; and bytes of states."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log = logging.getLogger("zinf_compile")
    log.addHandler(handler)
    model = build({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(2))
    much = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    log.setLevel(logging.INFO)
    other = Wide()
    for block in other.blocks:
        block.compile(backend=BACKEND)
    train(other, torch.optim.SGD(other.parameters(), lr=0.05), rank, range(1))
    states = [value for p in whole_of(model) for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return much, stream.getvalue(), sum(value.nbytes for value in states if value.dim())


class Wide(Stack):
    """Blocks that are nearly all of the model."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(broken=False)
        self.blocks = nn.ModuleList([WideBlock() for _ in range(2)])


class WideBlock(nn.Module):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 200), nn.Linear(200, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def joined(rank: int, world: int) -> tuple[bool, bool]:
    """Train with blocks alone compiled, then with all: states that were split become those of partitioned parameters."""
    model = build({})
    eager = copy.deepcopy(model)
    optimizer, expected = (OPTIMIZERS["momentum"](m.parameters()) for m in (model, eager))
    train(model, optimizer, rank, range(2))
    train_eager(eager, expected, world, range(2))
    model.compile(backend=BACKEND)
    train(model, optimizer, rank, range(2, 4))
    train_eager(eager, expected, world, range(2, 4))
    state = zinf_compile.full_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(state, dict(eager.state_dict()), rtol=1e-5, atol=1e-6)
    return isinstance(model.head.weight, ShardedParameter), "whole" in optimizer.state[model.head.weight][LAYOUT]


def by_accelerate(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, Callable[[nn.Module, int, int], torch.Tensor]]:
    """Return GPT-2 with its regions compiled by accelerate, the same eager, and their loss."""
    import transformers as hf  # noqa: PLC0415  (takes seconds, which other cases needn't)
    from accelerate.utils import compile_regions  # noqa: PLC0415

    sizes = {"vocab_size": 29, "n_embd": 6, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    eager = copy.deepcopy(model)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        words = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))
        out: torch.Tensor = model(input_ids=words, labels=words).loss
        return out

    return compile_regions(model, backend=BACKEND, options=options), eager, loss


def by_diffusers(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, Callable[[nn.Module, int, int], torch.Tensor]]:
    """Return Flux with its blocks compiled by diffusers, the same eager, and a loss."""
    from diffusers import FluxTransformer2DModel  # noqa: PLC0415

    sizes = {"in_channels": 4, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    model = FluxTransformer2DModel(
        patch_size=1, joint_attention_dim=6, pooled_projection_dim=6, axes_dims_rope=(2, 2, 4), guidance_embeds=False, **sizes
    )
    eager = copy.deepcopy(model)
    model.compile_repeated_blocks(backend=BACKEND, options=options)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, text, pooled = (torch.randn(*shape, generator=generator) for shape in ((2, 5, 4), (2, 3, 6), (2, 6)))
        out: torch.Tensor = model(
            hidden_states=x, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.tensor([0.1, 0.7]),
            img_ids=torch.arange(15.0).view(5, 3), txt_ids=torch.zeros(3, 3),
        ).sample  # fmt: skip
        return out.square().mean()

    return model, eager, loss


LIBRARIES = {"accelerate": by_accelerate, "diffusers": by_diffusers}


def compiled_by(rank: int, world: int, library: str, options: dict[str, Any]) -> list[str]:
    """Train a model that a library compiled block by block beside eager; return what is partitioned."""
    warnings.simplefilter("default")
    torch.manual_seed(3)
    model, eager, loss = LIBRARIES[library](options)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager))
    for step in range(2):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        by_rank = [torch.autograd.grad(loss(eager, other, step), list(eager.parameters())) for other in range(world)]
        for parameter, *grads in zip(eager.parameters(), *by_rank, strict=True):
            parameter.grad = sum(grads[1:], grads[0].clone()) / world
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, eager)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=0)
        optimizer.step()
        expected.step()
    state = zinf_compile.full_state_dict(model)
    states = zinf_compile.full_optimizer_state_dict(optimizer)
    if rank == 0:
        torch.testing.assert_close(state, dict(eager.state_dict()), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(states["state"], expected.state_dict()["state"], rtol=1e-4, atol=1e-6)
    return [name for name, p in model.named_parameters() if isinstance(p, ShardedParameter)]
