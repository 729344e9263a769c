"""Gradients of partitioned parameters on their way through autograd, on one process: bitwise eager."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Blocks, Mlp, vectors
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, adamw, assert_same, assert_same_models, in_place, plain_step, train_both, twins, whole_gradient

import zinf_compile
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.sharded.gradient import ShardedGradient

pytestmark = pytest.mark.keeps_graphs


def test_gradients_are_sharded_and_tell_their_whole_value() -> None:
    eager, ours = both(Mlp)
    for model in (eager, ours):
        model(*vectors(0)).backward()
    grad = ours.first.weight.grad
    assert isinstance(grad, ShardedGradient)
    assert repr(grad).startswith("tensor([[")
    assert_same("gradient", eager.first.weight.grad, grad.full_tensor())


@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_see_and_change_the_gradient(registered: str) -> None:
    eager, ours = both(Mlp)
    seen: dict[int, list[torch.Tensor]] = {id(eager): [], id(ours): []}

    def register(model: Mlp) -> None:
        def double(grad: torch.Tensor) -> torch.Tensor:
            seen[id(model)].append(grad.clone())
            return grad * 2

        model.first.weight.register_hook(double)
        model.second.bias.register_hook(lambda grad: None)

    for model in (eager, ours):
        if registered == "after":
            model(*vectors(9)).backward()
            model.zero_grad()
        register(model)
    train([eager, ours], plain_step)
    assert len(seen[id(ours)]) == 3
    for expected, found in zip(seen[id(eager)], seen[id(ours)], strict=True):
        assert isinstance(found, ShardedGradient)
        assert_same("gradient in the hook", expected, found.full_tensor())


def test_a_removed_hook_is_not_called() -> None:
    _, ours = both(Mlp)
    calls: list[int] = []
    handle = ours.first.weight.register_hook(lambda grad: calls.append(1))
    ours(*vectors(0)).backward()
    handle.remove()
    ours(*vectors(1)).backward()
    assert calls == [1]


def test_stepping_in_the_backward_by_post_accumulate_hooks() -> None:
    eager, ours = both(Blocks)
    for model in (eager, ours):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, fused=True) for p in model.parameters()}

        def step(parameter: torch.Tensor, optimizers: dict[torch.Tensor, Optimizer] = optimizers) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        losses = [model(*vectors(number)) for model in (eager, ours)]
        for loss in losses:
            loss.backward()
        assert_same("loss", *losses)
        assert_same_models(eager, ours, where=f"after step {number}")
    assert ours.first.weight.grad is None


def test_autograd_grad_returns_gradients_and_writes_none() -> None:
    eager, ours = both(Mlp)
    for number in range(3):
        expected, found = (torch.autograd.grad(m(*vectors(number)), list(m.parameters())) for m in (eager, ours))
        for (name, parameter), one, other in zip(ours.named_parameters(), expected, found, strict=True):
            assert isinstance(other, ShardedGradient)
            assert_same(name, one, other.full_tensor())
            assert parameter.grad is None


def test_autograd_grad_of_an_unused_parameter() -> None:
    eager, ours = both(CASES["branches"].build)
    results = []
    for model in (eager, ours):
        loss = model(*vectors(0), True)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, [model.first.weight, model.never.weight], retain_graph=True)
        results.append(torch.autograd.grad(loss, [model.first.weight, model.never.weight], allow_unused=True))
    assert_same("first", results[0][0], results[1][0].full_tensor())
    assert results[1][1] is None


@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
def test_backward_of_some_inputs_leaves_the_others_alone(backward: Callable[..., None]) -> None:
    eager, ours = both(Mlp)
    for number in range(3):
        for model in (eager, ours):
            backward(model(*vectors(number)), inputs=[model.first.weight, model.second.bias])
        assert_same_models(eager, ours, where=f"after backward {number}")
    assert ours.norm.weight.grad is None
    assert ours.first.weight.grad is not None


def test_a_hook_may_read_parameters_during_a_backward_of_some_inputs() -> None:
    """Eager reads inside hooks need the parameter's overrides: without them they would touch memory that isn't there."""
    _, ours = both(Mlp)
    read: list[torch.Tensor] = []
    ours.first.weight.register_hook(lambda grad: read.append(ours.second.weight + 1))
    ours(*vectors(0)).backward(inputs=[ours.first.weight])
    torch.autograd.grad(ours(*vectors(0)), [ours.first.weight])
    assert all(torch.equal(value, ours.second.weight.detach() + 1) for value in read)
    assert len(read) == 2


def test_two_backwards_through_one_graph() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward(retain_graph=True)
        (loss * 3).backward()
        optimizer.step()
        return loss

    train_both(CASES["used_twice"], step=step)


def test_a_backward_without_retain_graph_frees_the_graph() -> None:
    for model in both(Mlp):
        loss = model(*vectors(0))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_one_loss_of_two_calls_of_one_model() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch) + 0.5 * model(*vectors(77))
        loss.backward()
        optimizer.step()
        return loss

    train_both(CASES["mlp"], step=step)


def saved_and_loaded(grad: torch.Tensor) -> Any:
    """Save and load."""
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda grad: grad.norm(),
    "absolute maximum": lambda grad: grad.abs().max(),
    "mean": lambda grad: grad.mean(),
    "finite": lambda grad: torch.isfinite(grad).all(),
    "element": lambda grad: grad[0, 2],
    "product": lambda grad: grad @ torch.ones(grad.shape[1]),
    "numpy": lambda grad: torch.from_numpy(grad.detach().cpu().numpy().copy()),
    "list": lambda grad: torch.tensor(grad.tolist()),
    "deep copy": copy.deepcopy,
    "saved and loaded": saved_and_loaded,
    "whole of a sum": lambda grad: grad + torch.ones(grad.shape),
    "transposed": lambda grad: grad.t() * 1.0,
    "times a column": lambda grad: grad * torch.arange(float(grad.shape[0])).view(-1, 1),
    "beside a row": lambda grad: torch.where(torch.arange(grad.shape[1]) % 2 == 0, grad, 0.0),
    "without its rows' means": lambda grad: grad - grad.mean(1, keepdim=True),
    "over one number": lambda grad: grad / torch.full((1, 1), 3.0),
    "beside wider rows": lambda grad: grad + torch.ones(grad.shape[1], dtype=torch.float64),
}


@pytest.mark.parametrize("name", READS)
def test_a_gradient_is_read_as_eagers_on_one_process(name: str) -> None:
    results = []
    for model in both(Mlp):
        model(*vectors(0)).backward()
        result = READS[name](model.first.weight.grad)
        results.append(result.full_tensor() if isinstance(result, ShardedGradient) else result)
    assert_same(name, *results)


@pytest.mark.parametrize("shape", [(2, 13, 7), (7, 1), (1, 1, 1), (14,)])
def test_arithmetic_that_would_change_the_shape_of_a_gradient_is_refused(shape: tuple[int, ...]) -> None:
    model = both(Mlp)[1]
    model(*vectors(0)).backward()
    with pytest.raises(PartitionedParameterError, match=rf"arithmetic with one of {re.escape(str(list(shape)))} is not"):
        model.first.weight.grad * torch.ones(shape)


def test_arithmetic_of_two_gradients_of_other_shapes_is_refused() -> None:
    model = both(Mlp)[1]
    model(*vectors(0)).backward()
    with pytest.raises(PartitionedParameterError, match="arithmetic with one of"):
        model.first.weight.grad * model.first.bias.grad
    with pytest.raises(PartitionedParameterError, match="Use a gradient or tensor of its shape"):
        model.first.weight.grad.mul_(model.second.weight.grad)


@pytest.mark.parametrize("name", ["mul", "add", "maximum"])
def test_a_result_goes_where_out_says(name: str) -> None:
    results = []
    for model in both(Mlp):
        model(*vectors(0)).backward()
        grad, written = model.first.weight.grad, torch.zeros(model.first.weight.shape)
        with torch.no_grad():
            returned = getattr(torch, name)(grad, torch.full(grad.shape, 0.5), out=written)
            torch.mul(grad, 3.0, out=grad)
            of_plain = model.second.weight.grad
            getattr(torch, name)(torch.ones(of_plain.shape), torch.full(of_plain.shape, 0.5), out=of_plain)
        assert returned is written
        results.append([written, whole_gradient(model.first.weight), whole_gradient(model.second.weight)])
    assert_same("written", results[0][0], results[1][0])
    assert_same("changed in place", results[0][1], results[1][1])
    assert_same("written from plain tensors", results[0][2], results[1][2])


def test_gradients_scaled_replaced_and_removed_by_hand() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        model.first.weight.grad.mul_(0.5)
        model.first.bias.grad /= 3
        model.second.weight.grad = torch.ones_like(model.second.weight)
        model.norm.bias.grad = model.norm.bias.grad * 2 + 0.1
        model.second.bias.grad = None
        optimizer.step()
        return loss

    train_both(CASES["mlp"], step=step)


def test_updating_by_hand_under_no_grad() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.mul_(0.99)
        return loss

    train_both(CASES["mlp"], step=step)


def write(model: nn.Module, _: Optimizer) -> None:
    """Change the parameters of either kind of model."""
    with zinf_compile.gathered(model, write=True), torch.no_grad():
        model.get_parameter("second.weight").add_(1)


CHANGES: dict[str, Callable[[Any, Optimizer], Any]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "in place": lambda model, optimizer: torch.no_grad()(model.second.weight.add_)(1),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(model.state_dict()),
    "gathered": write,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_changed_between_forward_and_backward_raises_as_in_eager(change: str) -> None:
    for model in both(Mlp):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # fused, eager PyTorch doesn't notice
        model(*vectors(0)).backward()
        loss = model(*vectors(1))
        CHANGES[change](model, optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        model(*vectors(2)).backward()


def test_a_regional_loss_outside_the_compiled_part() -> None:
    """Eager layers before and after a compiled one: autograd goes through all three."""
    eager, ours = twins(Mlp)
    ours.second.compile(backend=BACKEND)
    train([eager, ours], plain_step)


def both(build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Return an eager and a compiled model."""
    eager, ours = twins(build)
    return eager, in_place(ours)


def train(models: list[Any], step: Callable[[Any, Optimizer, tuple[Any, ...]], torch.Tensor]) -> None:
    """Take three steps with both models and compare."""
    optimizers = [adamw(model.parameters()) for model in models]
    for number in range(3):
        losses = [step(m, optimizer, vectors(number)) for m, optimizer in zip(models, optimizers, strict=True)]
        assert_same("loss", *(loss.detach() for loss in losses))
        assert_same_models(*models, where=f"after step {number}")
    assert whole_gradient(models[1].second.weight) is not None
