"""A drive that fails in the middle of a change: what is left is a mixture, and nobody computes with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, offloaded_of
from tier_twins import twins
from tiers import context_of, words
from training import assert_same

import zinf_compile
from zinf_compile.errors import StepFailedError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def backward(model: Any, step: int) -> None:
    for micro in range(2):
        model(words(step, micro)).backward()


def assert_refused(model: Any, said: str) -> None:
    """Whoever needs the values is told, again and again."""
    weight = model.embedding.weight
    reads: list[Callable[[], object]] = [
        lambda: model(words(0, 0)),
        lambda: model(words(0, 0)),
        lambda: weight.detach() + 1,
        lambda: weight.detach().norm(),
        lambda: zinf_compile.full_state_dict(model),
        lambda: torch.equal(weight.detach(), torch.zeros(23, 9)),
        lambda: model(words(0, 0)),
    ]
    for read in reads:
        with pytest.raises(StepFailedError, match=rf"(?s){said}.*[Ll]oad "):
            read()


@pytest.mark.parametrize(("way", "number"), [("write", 1), ("read", 1), ("write", 2)])
def test_a_change_in_place(way: str, number: int, tmp_path: Path) -> None:
    ours, _, eager, _ = twins(tmp_path)
    zinf_compile.synchronize()
    whole = copy.deepcopy(eager.state_dict())
    weight = ours.embedding.weight
    for restore in ("loaded", "overwritten"):
        with (
            torch.no_grad(),
            failing(context_of(ours).engine, way, number),
            pytest.raises(
                StepFailedError, match=r"mul_\(\) of embedding.weight .*incomplete.*Load a checkpoint.* Cause: "
            ) as error,
        ):
            weight.mul_(2)
        assert isinstance(error.value.__cause__, StoreError)
        assert_refused(ours, "mul_.* of embedding.weight ended in its middle")
        if restore == "loaded":
            zinf_compile.load_full_state_dict(ours, whole)
        else:
            with torch.no_grad():
                weight.copy_(whole["embedding.weight"])
        for name, value in zinf_compile.full_state_dict(ours).items():
            assert_same(name, whole[name], value)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_change_of_a_gradient(set_to_none: bool, tmp_path: Path) -> None:
    """Until the gradient is dropped, or overwritten."""
    ours, optimizer, _, _ = twins(tmp_path)
    backward(ours, 2)
    grad = ours.embedding.weight.grad
    other = ours.embedding.weight.detach() * 1
    with failing(context_of(ours).engine, "write", 1), pytest.raises(StepFailedError, match=r"of embedding.weight .*incomplete"):
        grad.add_(other)
    for _ in range(2):
        with pytest.raises(StepFailedError, match="incomplete"):
            optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(ours, 3)
    optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_a_streamed_step(late: bool, tmp_path: Path) -> None:
    ours, optimizer, eager, other = twins(tmp_path)
    zinf_compile.synchronize()
    optimizer.state_dict()
    whole = copy.deepcopy(eager.state_dict()), copy.deepcopy(other.state_dict())
    for model in (ours, eager):
        backward(model, 2)
    (states,) = offloaded_of(optimizer)
    states._defers = late

    def step() -> None:
        optimizer.step()
        zinf_compile.synchronize()

    with failing(context_of(ours).engine, "read", 9), pytest.raises(StepFailedError, match=r"middle.*Load a checkpoint.*Cause"):
        step()
    assert_refused(ours, "ended in the middle")
    zinf_compile.load_full_state_dict(ours, whole[0])
    optimizer.load_state_dict(whole[1])
    for name, value in zinf_compile.full_state_dict(ours).items():
        assert_same(name, whole[0][name], value)
