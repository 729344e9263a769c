"""Values that a forward saves for its backward, kept on a drive meanwhile: the bits of keeping them, and nothing left behind."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import context_of
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zinf_compile
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.errors import OptionError, UnsupportedModelError
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.runtime.transfer.saved_value import SavedValue

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

Call = Callable[[torch.Tensor], torch.Tensor]
WIDTH, TOKENS = 64, 96


class Attention(nn.Module):
    """A block with views, masks, several results of one operator, and a buffer that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch_norm, self.drop = nn.BatchNorm1d(TOKENS), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.drop(nn.functional.gelu(self.out(self.batch_norm(y))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Attention() for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.blocks(x)).square().mean()


class Moving(GraphCompiler):
    """Checks that something leaves where it should, and nothing elsewhere."""

    def choose_homes(self, memories: Any) -> Any:
        chosen = super().choose_homes(memories)
        assert bool(chosen) == (self.config.activations == "nvme")
        return chosen


def build(options: dict[str, Any]) -> tuple[Any, Call]:
    torch.manual_seed(0)
    model = Model()
    config = Config.from_options({"compute": "fx", **options})
    return model, torch.compile(model, backend=lambda gm, inputs: Moving(config).compile(gm, inputs))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tuple[Any, Call], tuple[Any, Call]]]:
    """Return the model with its values kept, and the same with them on a drive, each with what is called."""
    torch.compiler.reset()
    folder = tmp_path_factory.mktemp("drive")
    yield build({}), build({"activations": "nvme", "nvme": str(folder)})
    torch.compiler.reset()


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))


def in_use(model: nn.Module) -> int:
    gc.collect()
    return sum(space.bytes for space in context_of(model)._value_spaces.values())


def same(pair: Any, act: Callable[[Any, Call], Any]) -> Any:
    """Do it with both models and compare what comes out, gradients and buffers; return what comes out."""
    found = []
    for model, call in pair:
        torch.manual_seed(3)
        result = act(model, call)
        grads = [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
        found.append([result.detach(), *grads, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()])
        model.zero_grad()
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    assert in_use(pair[1][0]) == 0, "all space was given back"
    return found[1][0]


def test_two_micro_batches_in_flight(pair: Any) -> None:
    def act(model: Any, call: Call) -> torch.Tensor:
        first, second = call(batch(1)), call(batch(2))
        first.backward()
        second.backward()
        return first + second

    same(pair, act)
    links = zinf_compile.stats(pair[1][0])["links"]
    assert links["nvme to host"]["bytes"] == links["host to nvme"]["bytes"] > 2 * 4 * TOKENS * WIDTH * 4 * 3


def test_a_second_backward_of_one_graph(pair: Any) -> None:
    def act(model: Any, call: Call) -> torch.Tensor:
        loss = call(batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    same(pair, act)


def test_a_forward_without_a_backward_gives_everything_back(pair: Any) -> None:
    def act(model: Any, call: Call) -> torch.Tensor:
        dropped = call(batch(1))
        if model is pair[1][0]:
            assert in_use(model) > 0
        del dropped
        with torch.no_grad():
            call(batch(2))
        loss = call(batch(3))
        loss.backward()
        return loss

    same(pair, act)


def test_an_error_in_between_leaves_nothing(pair: Any) -> None:
    def act(model: Any, call: Call) -> torch.Tensor:
        x = batch(1).requires_grad_()
        x.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(x).backward()
        del x
        model.zero_grad()
        loss = call(batch(1))
        loss.backward()
        return loss

    same(pair, act)


def test_the_users_checkpoint_around_the_model(pair: Any) -> None:
    def act(model: Any, call: Call) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(call, batch(1), use_reentrant=False)
        loss.backward()
        return loss

    same(pair, act)


def test_hooks_of_saved_tensors(pair: Any) -> None:
    """Those that pass values on work; those that read them are refused."""
    seen: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        seen.append(value)
        return value

    def act(model: Any, call: Call) -> torch.Tensor:
        with saved_tensors_hooks(pack, lambda value: value):
            loss = call(batch(1))
        loss.backward()
        kinds = {type(value) for value in seen}
        assert (SavedValue in kinds) == (model is pair[1][0])
        seen.clear()
        return loss

    same(pair, act)
    _, call = pair[1]
    with save_on_cpu():  # which they are
        call(batch(1)).backward()
    refused = pytest.raises(UnsupportedModelError, match=r"option activations moved to 'nvme': hooks of saved tensors")
    with refused, saved_tensors_hooks(lambda v: v if isinstance(v, nn.Parameter) else v.clone(), lambda value: value):
        call(batch(1))
    replaced = saved_tensors_hooks(lambda v: torch.zeros(v.shape) if isinstance(v, SavedValue) else v, lambda value: value)
    with replaced:
        loss = call(batch(1))
    with pytest.raises(UnsupportedModelError, match="came back to the backward as a Tensor"):
        loss.backward()
    del loss, refused  # which has the frames
    assert in_use(pair[1][0]) == 0


class _Checkpointed(nn.Module):
    """Two blocks that are computed again, but for what `context_fn` says."""

    def __init__(self, context_fn: Callable[[], Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.more = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x.sin(), use_reentrant=False, **self.more)
        return x.square().mean()


def _saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    ("context_fn", "sizes"),
    [(None, {64}), (functools.partial(create_selective_checkpoint_contexts, _saves_products), {64, 256})],
    ids=["all", "but for products"],
)
def test_what_checkpoints_compute_again_neither_leaves_nor_stays(
    context_fn: Callable[[], Any] | None, sizes: set[int], tmp_path: Path
) -> None:
    chosen: list[SavedMemory] = []

    class Noting(GraphCompiler):
        def choose_homes(self, memories: Sequence[SavedMemory]) -> tuple[SavedMemory, ...]:
            found = super().choose_homes(memories)
            chosen.extend(found)
            assert [memory.name for memory in found or memories] == [memory.name for memory in memories]
            return found

    found = []
    for options in ({}, {"activations": "nvme", "nvme": str(tmp_path)}):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = _Checkpointed(context_fn)
        config = Config.from_options({"compute": "fx", **options})
        call: Any = torch.compile(model, backend=lambda gm, inputs, config=config: Noting(config).compile(gm, inputs))
        loss = call(batch(1).flatten(0, 1))
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])  # type: ignore[union-attr, operator]
    assert all(map(torch.equal, *found))
    rows = 4 * TOKENS
    assert {memory.bytes // (4 * rows) for memory in chosen} == sizes


def test_double_backward_is_refused_by_name(pair: Any) -> None:
    _, call = pair[1]
    x = batch(1).requires_grad_()
    (grad,) = torch.autograd.grad(call(x), x, create_graph=True)
    with pytest.raises(UnsupportedModelError, match="double backward"):
        grad.sum().backward()


def test_options() -> None:
    accepted = "'auto', 'keep', 'recompute', 'host', 'nvme'"
    with pytest.raises(OptionError, match=f"option activations='disk' is not known; accepted: {accepted}"):
        Config.from_options({"activations": "disk"})
    with pytest.raises(OptionError, match=r"option activations='nvme' needs a drive"):
        Config.from_options({"activations": "nvme"})
    assert Config.from_options({"activations": "nvme", "nvme": "."}).signature() != Config().signature()


def test_a_model_partitioned_before(tmp_path: Path) -> None:
    """Its states need no drive, its activations do."""
    torch.compiler.reset()
    with zinf_compile.partitioned():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    options = {"compute": "fx", "activations": "nvme", "nvme": str(tmp_path)}
    call: Any = torch.compile(model, backend="zero_infinity", options=options)
    call(torch.randn(512, 64)).sum().backward()
    written = zinf_compile.stats(model)["links"]["host to nvme"]["bytes"]
    call(torch.randn(512, 64)).sum().backward()
    assert zinf_compile.stats(model)["links"]["host to nvme"]["bytes"] - written == 512 * 64 * 4
    assert zinf_compile.stats(model)["memory"]["device"]["now"]["activations"] == 0


def test_host_memory_that_is_the_devices_keeps() -> None:
    _, call = build({"activations": "host"})
    torch.compiler.reset()
    call(batch(1)).backward()  # `Moving` checks that nothing is chosen


def test_pytorchs_own_budget_is_refused_by_name() -> None:
    torch.compiler.reset()
    call: Any = torch.compile(nn.Linear(3, 3), backend="zero_infinity", options={"compute": "fx", "params": "device"})
    refused = pytest.raises(OptionError, match=r"activation_memory_budget=0\.3: not supported")
    with torch._functorch.config.patch(activation_memory_budget=0.3), refused:
        call(torch.randn(2, 3))
    call(torch.randn(2, 3)).sum().backward()
