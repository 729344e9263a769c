"""Models of which Dynamo compiles nothing, which no backend is told: the first step says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recurrent import Recurrent, batch

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
    model = Recurrent()
    call: Any = torch.compile(model, backend="zero_infinity", options={"compute": "fx"}) if wrapped else model
    if not wrapped:
        model.compile(backend="zero_infinity", options={"compute": "fx"})
    with pytest.warns(UserWarning, match="has compiled nothing of Recurrent") as caught:
        _step(model, call, times=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "one that calls an nn.LSTM" in str(caught[0].message)
    assert "set torch._dynamo.config.allow_rnn = True, or call it from a module of your own" in str(caught[0].message)


@pytest.mark.usefixtures("_traces_recurrent_layers")
def test_as_the_warning_says_it_is_compiled() -> None:
    model = Recurrent()
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    _step(model, model)
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())


def test_a_module_of_its_own_leaves_the_rest_compiled() -> None:
    model = Recurrent(apart=True)
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    _step(model, model)
    assert isinstance(model.words.weight, ShardedParameter)


def test_other_models_are_left_alone() -> None:
    torch.compile(Recurrent(), backend="zero_infinity", options={"compute": "fx"})  # which nothing trains
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Recurrent()
        _step(model, model)
        other = Recurrent()
        _step(other, torch.compile(other, backend="eager"))
