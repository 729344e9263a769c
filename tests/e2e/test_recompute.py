"""Saved values that are made again in the backward: the bits of keeping them, less memory, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Region
from zinf_compile.ir.value_steps import DropValue
from zinf_compile.runtime.transfer.dropped_value import DroppedValue
from zinf_compile.sharded.gradient import ShardedGradient

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

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


@pytest.fixture(scope="module")
def pair() -> Iterator[Twins]:
    torch.compiler.reset()
    found: Twins = Twin("keep", Model), Twin("recompute", Model)
    yield found
    torch.compiler.reset()


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


def test_training(pair: Twins) -> None:
    same(pair, train)
    again = [step for step in pair[1].programs["backward"].steps if isinstance(step, Region) and step.name.endswith("again")]
    forward = {step.fn for step in pair[1].programs["forward"].steps if isinstance(step, Region)}
    assert again
    assert {step.fn for step in again} <= forward, "the same code"
    blocks = [step.name[: len("blocks.0")] for step in again]
    assert list(dict.fromkeys(blocks)) == ["blocks.2", "blocks.1", "blocks.0"], "one after the other"


def test_two_micro_batches_in_flight(pair: Twins) -> None:
    """The second forward changes the buffers that the first has read."""

    def act(twin: Twin) -> torch.Tensor:
        first, second = twin.call(*batch(1)), twin.call(*batch(2))
        first.backward()
        second.backward()
        return first + second

    same(pair, act)


def test_a_second_backward_of_one_graph(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        loss = twin.call(*batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    same(pair, act)


def test_a_forward_without_a_backward_and_evaluation(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        twin.call(*batch(1))
        twin.model.eval()
        with torch.no_grad():
            twin.call(*batch(2))
        twin.model.train()
        loss = twin.call(*batch(3))
        loss.backward()
        return loss

    same(pair, act)


def test_a_step_between_forward_and_backward_is_the_error_of_pytorch(pair: Twins) -> None:
    for twin in pair:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
        twin.call(*batch(1)).backward()
        loss = twin.call(*batch(2))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        twin.model.zero_grad()


def test_an_error_in_the_backward_leaves_the_generators_state(pair: Twins) -> None:
    torch.manual_seed(3)
    pair[0].call(*batch(1))  # it changes buffers
    torch.manual_seed(3)
    twin = pair[1]
    loss = twin.call(*batch(1))
    step = next(s for s in twin.programs["backward"].steps if isinstance(s, Region) and s.name.endswith("again"))
    before = torch.get_rng_state()

    def broken(values: list[Any]) -> Any:
        torch.rand(3)
        raise ZeroDivisionError

    fn = step.fn
    object.__setattr__(step, "fn", broken)
    try:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    finally:
        object.__setattr__(step, "fn", fn)
    assert torch.equal(torch.get_rng_state(), before)
    twin.model.zero_grad()


def test_checkpoints_around_the_model_and_hooks_that_read(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(twin.call, *batch(1), use_reentrant=False)
        loss.backward()
        return loss

    same(pair, act)
    with save_on_cpu():  # which they are
        same(pair, act)
    reading = saved_tensors_hooks(lambda v: v if isinstance(v, nn.Parameter) else v.clone(), lambda v: v)
    with pytest.raises(UnsupportedModelError, match=r"activations='recompute'.*hooks of saved tensors"), reading:
        pair[1].call(*batch(1))
    assert "DroppedValue(value" in repr(DroppedValue.of(torch.ones(2), "value 0"))


def test_an_input_that_the_loop_refills_before_the_backward(pair: Twins) -> None:
    """Eager would not save it: what the blocks read is a copy."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x + shift)
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        x, shift = torch.randn(4, 8), torch.randn(4, 8)
        loss = twin.call(x, shift)
        shift.zero_()
        loss.backward()
        return loss

    same(twins(Shifted), act)


def test_a_large_buffer_is_read_again_and_may_not_change() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(600, 512))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x + self.table[:4, :8])
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        loss = twin.call(torch.ones(4, 8))
        loss.backward()
        return loss

    pair = twins(Table)
    same(pair, act)
    loss = pair[1].call(torch.ones(4, 8))
    pair[1].model.table.zero_()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Checkpointed(nn.Module):
    """Blocks of which some are checkpointed by the user, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)) for _ in range(6)
        )

    def half(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for number in range(first, first + 3):
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x.sin()))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        torch._dynamo.graph_break()
        return self.half(x, 3).square().mean()


def test_checkpoints_in_the_model_and_several_graphs() -> None:
    def act(twin: Twin) -> torch.Tensor:
        x = torch.randn(8, WIDTH, requires_grad=True)
        loss = twin.call(x)
        loss.backward()
        return loss

    same(twins(Checkpointed), act)


class Small(nn.Module):
    """Blocks with dropout: little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 50)[..., :32] * scale
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Small, {"device_memory": "64MiB"}),
        (Small, {"planner": "cached_prefetch"}),
        (Small, {"tile": "4KiB"}),
        (Small, {"bucket": "8KiB"}),
        (Model, {"chunk_loss": True}),
    ],
)
def test_other_options(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    same(twins(make, **options), train, drops="tile" not in options)


def test_batch_norm_without_momentum() -> None:
    """It breaks the graph within a block."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(momentum=None if number == 1 else 0.1) for number in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, x.mean())
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        first, second = twin.call(torch.randn(4, TOKENS, WIDTH)), twin.call(torch.randn(4, TOKENS, WIDTH))
        first.backward()
        second.backward()
        return first + second

    same(twins(Averaging), act, drops=None)


def test_dynamic_shapes() -> None:
    pair = twins()

    def act(twin: Twin) -> torch.Tensor:
        losses = []
        for size in (4, 5, 7):
            loss = twin.call(*batch(size, size))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    same(pair, act)


def test_autocast() -> None:
    def act(twin: Twin) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin.call(*batch(1))
        loss.backward()
        return loss

    same(twins(), act)


def test_parameters_on_a_drive(tmp_path: Any) -> None:
    same(twins(Small, params="nvme", nvme=str(tmp_path)), train)
