"""One model twice: its saved values are kept, or made again in the backward. With what both have to give alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.ir.value_steps import DropValue
from zinf_compile.sharded.gradient import ShardedGradient

Call = Callable[..., torch.Tensor]
WIDTH, TOKENS = 32, 16


class Block(nn.Module):
    """Attention and an MLP, with views, dropout, and a buffer that the forward changes."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch_norm, self.drop = nn.BatchNorm1d(TOKENS, momentum=momentum), nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(nn.functional.gelu(self.out(self.batch_norm(y)))) * scale
        return x + self.drop(self.mlp(x))


class Model(nn.Module):
    """Tied embeddings, a frozen parameter, blocks with dropout and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0].out.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, scale)
        return nn.functional.cross_entropy(self.head(self.spectral(x)).flatten(0, 1), tokens.flatten())


class Watching(GraphCompiler):
    """Keeps the programs, and counts the regions that are compiled."""

    def __init__(self, config: Config, programs: dict[str, Program]) -> None:
        super().__init__(config)
        self.programs = programs

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        program = super().schedule(graph, kind)
        self.programs[kind] = program
        return program


class Twin:
    """A model by one word of option `activations`."""

    def __init__(self, word: str, make: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.programs = make(), dict[str, Program]()
        config = Config.from_options({"compute": "fx", "activations": word, **options})
        self.call: Call = torch.compile(
            self.model, backend=lambda gm, inputs: Watching(config, self.programs).compile(gm, inputs)
        )

    @property
    def dropped(self) -> int:
        return sum(isinstance(step, DropValue) for step in self.programs["forward"].steps)


Twins = tuple[Twin, Twin]


def twins(make: Callable[[], nn.Module] = Model, **options: Any) -> Twins:
    torch.compiler.reset()  # models of one class are one function to Dynamo
    return Twin("keep", make, **options), Twin("recompute", make, **options)


def batch(number: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 50, (size, TOKENS), generator=generator), torch.rand(1, generator=generator)


def same(pair: Twins, act: Callable[[Twin], torch.Tensor], *, drops: bool | None = True) -> None:
    """Do it with both and compare results, gradients, buffers, and the state of the random generator."""
    found = []
    for twin in pair:
        torch.manual_seed(3)
        result = act(twin)
        grads = [p.grad for p in twin.model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if isinstance(g, ShardedGradient) else g for g in grads]
        found.append(
            [result.detach(), *(g.clone() for g in whole), *(b.clone() for b in twin.model.buffers()), torch.get_rng_state()]
        )
        twin.model.zero_grad()
    assert len(found[0]) == len(found[1]) > 2
    assert all(map(torch.equal, *found))
    assert pair[0].dropped == 0
    assert drops is None or bool(pair[1].dropped) == drops


def train(twin: Twin) -> torch.Tensor:
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-3, fused=True)
    losses = []
    for number in range(2):
        loss = twin.call(*batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if number == 0:
            optimizer.zero_grad()
    return torch.stack(losses)
