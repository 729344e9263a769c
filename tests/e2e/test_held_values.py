"""Parameters that eager code used, in the same forward, before a graph partitions them: the backward finds their values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from training import BACKEND, whole_gradient
from used_before import UsedBefore, steps

import zinf_compile
from zinf_compile._torch import no_torch_function
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")


def compiled(folder: Path, kinds: tuple[str, ...] = ()) -> tuple[UsedBefore, Any]:
    torch.manual_seed(0)
    model = UsedBefore()
    options = {**dict.fromkeys(kinds, "nvme"), **({"nvme": str(folder)} if kinds else {})}
    return model, torch.compile(model, backend=BACKEND, options=options)


def whole_bytes(model: torch.nn.Module) -> int:
    with no_torch_function():
        return sum(p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("kinds", [(), ("params",), ("params", "grads", "optimizer")])
def test_eager_code_before_a_graph_trains_what_both_use(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model, call = compiled(tmp_path, kinds)
    torch.manual_seed(0)
    eager = UsedBefore()
    torch.testing.assert_close(steps(model, call), steps(eager, eager), rtol=1e-5, atol=0)
    assert all(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    for name, value in zinf_compile.full_state_dict(model).items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


def test_whole_values_go_when_the_backward_is_over(tmp_path: Path) -> None:
    model, call = compiled(tmp_path, ("params",))
    loss = call(torch.randn(2, 4, 8)).sum()
    assert whole_bytes(model) > 0
    loss.backward()
    call(torch.randn(2, 4, 8))
    assert whole_bytes(model) == 0


def test_whole_values_go_at_the_next_step(tmp_path: Path) -> None:
    model, call = compiled(tmp_path)
    loss = call(torch.randn(2, 4, 8)).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    with no_torch_function():
        assert not any(p.untyped_storage().nbytes() for p in model.parameters() if p.requires_grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_behind_gathered_finds_what_code_inside_used(tmp_path: Path) -> None:
    model, call = compiled(tmp_path, ("params",))
    steps(model, call)
    x = torch.randn(2, 4, 8)
    with zinf_compile.gathered(model):
        loss = (model.layers(x) ** 2).sum()
    loss.backward()
    expected = UsedBefore()
    expected.load_state_dict(zinf_compile.full_state_dict(model))
    (expected.layers(x) ** 2).sum().backward()
    for name, parameter in expected.named_parameters():
        found = whole_gradient(model.get_parameter(name))
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    del loss
    call(x)
    assert whole_bytes(model) == 0


@pytest.mark.parametrize("flat", [False, True])
def test_hooks_that_keep_saved_tensors_find_their_values(flat: bool, tmp_path: Path) -> None:
    model, call = compiled(tmp_path, ("params",))
    eager = copy.deepcopy(model)
    if flat:  # parameters that are parts of one storage
        memory = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), memory.split([p.numel() for p in model.parameters()]), strict=True):
            parameter.data = part.view(parameter.shape)
        del memory, part
    x = torch.randn(2, 4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        call(x).square().sum().backward()
    eager(x).square().sum().backward()
    for name, parameter in eager.named_parameters():
        if parameter.grad is not None:
            found = whole_gradient(model.get_parameter(name))
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert whole_bytes(model) == 0


def test_an_inference_comes_between_a_forward_and_its_backward(tmp_path: Path) -> None:
    model, call = compiled(tmp_path)
    eager = copy.deepcopy(model)
    x = torch.randn(2, 4, 8)
    loss = call(x).square().sum()
    with torch.inference_mode():
        call(x)
    loss.backward()
    eager(x).square().sum().backward()
    found = whole_gradient(model.norm.weight)
    torch.testing.assert_close(found, eager.norm.weight.grad, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        call(x)
    assert whole_bytes(model) == 0


def test_a_refused_conversion_inside_gathered_leaves_the_parameters_hollow(tmp_path: Path) -> None:
    model, call = compiled(tmp_path, ("params",))
    call(torch.randn(2, 4, 8)).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.zero_grad()
    kept = []

    def convert() -> None:
        with zinf_compile.gathered(model, write=True):
            kept.extend(parameter.data for parameter in model.half().parameters())

    with pytest.raises(zinf_compile.ZinfError, match="float16"):
        convert()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert whole_bytes(model) == 0
