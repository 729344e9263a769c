"""Models of which Dynamo compiles nothing, which no backend is told: the first step says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from recurrent import Looped, Recurrent, batch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from versions import leaves_recurrent_forwards

import zinf_compile
from zinf_compile.optim.eager_models import watch_steps
from zinf_compile.sharded.parameter import ShardedParameter


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_steps()  # as at the start of a process: earlier tests may have used up its searches


@pytest.fixture
def _traces_recurrent_layers() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def _step(model: torch.nn.Module, call: Any, times: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(times):
        call(batch(0, 0)).backward()
        optimizer.step()


@pytest.mark.parametrize("wrapped", [False, True], ids=["in place", "wrapped"])
def test_the_first_step_warns_once(wrapped: bool) -> None:
    model = Looped()
    call: Any = torch.compile(model, backend="zero_infinity", options={"compute": "fx"}) if wrapped else model
    if not wrapped:
        model.compile(backend="zero_infinity", options={"compute": "fx"})
    with pytest.warns(UserWarning, match="has compiled nothing of Looped") as caught:
        _step(model, call, times=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "as one with a graph break in a loop" in str(caught[0].message)
    assert "let a module of its own have what breaks the graph" in str(caught[0].message)


@leaves_recurrent_forwards
def test_a_recurrent_layer_is_named() -> None:
    model = Recurrent()
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    with pytest.warns(UserWarning, match="as one that calls an nn.LSTM") as caught:
        _step(model, model)
    assert "call it from a module of your own, or set torch._dynamo.config.allow_rnn = True" in str(caught[0].message)


class _Blocks(torch.nn.Module):
    """Blocks in a loop, the first of which has a backward hook."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU()) for _ in range(3)]
        self.blocks = torch.nn.ModuleList(map(_Own, blocks) if own else blocks)
        self.blocks[0].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class _Own(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def test_a_module_with_a_backward_hook_is_named_and_the_way_out_works() -> None:
    model = _Blocks(own=False)
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, requires_grad=True)).backward()
    with pytest.warns(UserWarning, match="a module with a backward hook, as 'blocks.0'") as caught:
        optimizer.step()
    assert "let the modules of that loop be of a class of your own, and hook these" in str(caught[0].message)
    model = _Blocks(own=True)
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
    model(torch.ones(2, 6, requires_grad=True)).backward()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())


@pytest.mark.usefixtures("_traces_recurrent_layers")
def test_as_the_warning_says_it_is_compiled() -> None:
    model = Recurrent()
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
    _step(model, model)
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())


def test_a_module_of_its_own_leaves_the_rest_compiled() -> None:
    model = Recurrent(apart=True)
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
    _step(model, model)
    assert isinstance(model.words.weight, ShardedParameter)


def test_other_models_are_left_alone() -> None:
    torch.compile(Looped(), backend="zero_infinity", options={"compute": "fx"})  # which nothing trains
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Looped()
        _step(model, model)
        other = Looped()
        _step(other, torch.compile(other, backend="eager"))


@pytest.mark.parametrize("partitioned", [True, False], ids=["partitioned", "ordinary"])
def test_trials_of_optimizers_are_no_searches(partitioned: bool) -> None:
    """Nor are models that use a graph which was compiled for another one."""
    for _ in range(12):
        model = Mlp()
        model.compile(backend="zero_infinity", options={"compute": "fx", **({"params": "device"} if partitioned else {})})
        optimizer = torch.optim.AdamW(model.parameters())
        model(*vectors(0)).backward()
        optimizer.step()
    eager = Looped()
    eager.compile(backend="zero_infinity", options={"compute": "fx"})
    with pytest.warns(UserWarning, match="has compiled nothing of Looped"):
        _step(eager, eager)


def test_a_step_in_whose_closure_the_gradients_are_made_warns() -> None:
    model = Looped()
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(batch(0, 0))
        loss.backward()
        return loss.item()

    with pytest.warns(UserWarning, match="has compiled nothing of Looped"):
        optimizer.step(closure)


def test_an_uncompiled_part_beside_a_compiled_one_is_left_alone() -> None:
    """As of a model for adversarial training whose parts have optimizers of their own, the compiled one's being the second."""
    whole = torch.nn.ModuleDict({"compiled": Mlp(), "eager": torch.nn.Linear(2, 2)})
    whole["compiled"].compile(backend="zero_infinity", options={"compute": "fx"})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole["eager"](torch.ones(2)).sum().backward()
        optimizers["eager"].step()
        whole["compiled"](*vectors(0)).backward()
        optimizers["compiled"].step()


def test_states_made_before_the_first_forward_are_no_step() -> None:
    model = Mlp()
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "device"})
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch.distributed")
        get_optimizer_state_dict(model, optimizer)
        model(*vectors(0)).backward()
        optimizer.step()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())


class Half(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float().square().mean()  # type: ignore[no-any-return]


def half(seed: int) -> tuple[Half, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Half()
    model.compile(backend="zero_infinity", options={"compute": "fx", "params": "host", "master": "float32"})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def test_the_step_of_a_loaded_gradient_says_what_comes_first(tmp_path: Path) -> None:
    """Nothing is partitioned before the first call, and master copies have no place."""
    model, optimizer = half(0)
    x = torch.linspace(-1, 1, 128).view(8, 16).bfloat16()
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).backward()
    zinf_compile.save(tmp_path / "saved", model, optimizer, wait=True)
    optimizer.step()
    expected = [p.clone() for p in zinf_compile.full_state_dict(model).values()]
    for called in (True, False):
        torch.compiler.reset()
        zinf_compile.reset()
        watch_steps()
        model, optimizer = half(1)
        zinf_compile.load(tmp_path / "saved", model, optimizer)
        if called:
            with torch.no_grad():
                model(x)
            optimizer.step()
            assert all(map(torch.equal, zinf_compile.full_state_dict(model).values(), expected))
        else:
            with pytest.warns(UserWarning, match="call it once first, under torch.no_grad.*drops the master copies"):
                optimizer.step()


def test_an_evaluation_comes_first_where_nothing_moves(tmp_path: Path) -> None:
    """As the warning asks; the graph makes no gradients, and its parameters stay ordinary ones."""

    def build(seed: int) -> tuple[Mlp, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Mlp()
        model.compile(backend="zero_infinity", options={"compute": "fx"})
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    model, optimizer = build(0)
    model(*vectors(0)).backward()
    zinf_compile.save(tmp_path / "saved", model, optimizer, wait=True)
    optimizer.step()
    expected = [p.detach().clone() for p in model.parameters()]
    torch.compiler.reset()
    zinf_compile.reset()
    watch_steps()
    model, optimizer = build(1)
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    with torch.no_grad():
        model(*vectors(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), expected))
