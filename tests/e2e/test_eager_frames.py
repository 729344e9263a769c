"""Forwards that Dynamo leaves to eager code, on parameters that another graph has partitioned and that live off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layerdrop import Encoder, trained, values_of
from torch import nn

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter


def with_layer_on_drive(folder: Path) -> tuple[nn.Module, nn.Parameter]:
    """Return a trained model and the weight of its first layer, which lives on a drive."""
    _, model = trained({"params": "nvme", "nvme": str(folder)}, evaluate=True)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    return model, encoder.layers[0].get_parameter("up.weight")


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize(
    ("kinds", "reentrant"),
    [((), None), (("params",), None), (("params", "grads", "optimizer"), None), (("params",), False), (("params",), True)],
)
def test_training_goes_on_behind_an_evaluation(
    evaluate: bool, kinds: tuple[str, ...], reentrant: bool | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**dict.fromkeys(kinds, "nvme"), **({"nvme": str(tmp_path)} if kinds else {})}
    losses, model = trained(options, evaluate=evaluate, reentrant=reentrant)
    expected, eager = trained(None, evaluate=evaluate, reentrant=reentrant)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    assert isinstance(encoder.norm.weight, ShardedParameter) == evaluate
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    for (name, value), wanted in zip(zinf_compile.full_state_dict(model).items(), values_of(eager), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_code_outside_of_a_forward_reads_whole_values_on_one_rank(tmp_path: Path) -> None:
    model, weight = with_layer_on_drive(tmp_path)
    value = zinf_compile.full_state_dict(model)["encoder.layers.0.up.weight"]
    torch.testing.assert_close(torch.linalg.qr(weight)[0].detach(), torch.linalg.qr(value)[0])
    torch.linalg.qr(weight)[1].diagonal().sum().backward()
    wanted = value.clone().requires_grad_()
    torch.linalg.qr(wanted)[1].diagonal().sum().backward()
    assert weight.grad is not None
    assert wanted.grad is not None
    torch.testing.assert_close(weight.grad.full_tensor(), wanted.grad)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_a_step_between_reading_and_backward_changes_no_gradient(tmp_path: Path) -> None:
    model, weight = with_layer_on_drive(tmp_path)
    before = zinf_compile.full_state_dict(model)["encoder.layers.0.up.weight"].clone()
    x = torch.ones(2, 16, requires_grad=True)
    loss = torch.nn.functional.linear(x, weight).square().sum()
    model.eval()(torch.randn(4, 8)).backward()  # no layer is left out
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    loss.backward()
    assert not torch.equal(zinf_compile.full_state_dict(model)["encoder.layers.0.up.weight"], before)
    torch.testing.assert_close(x.grad, 2 * (torch.ones(2, 16) @ before.t()) @ before)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_a_value_that_autograd_keeps_is_counted_until_its_backward(tmp_path: Path) -> None:
    _, weight = with_layer_on_drive(tmp_path)
    assert isinstance(weight, ShardedParameter)
    ledger = weight._zinf_unit.context.memory.ledger
    before = ledger.now()["staging"]
    loss = torch.nn.functional.linear(torch.ones(2, 16, requires_grad=True), weight).sum()
    assert ledger.now()["staging"] == before + 16 * 16 * 4
    loss.backward()
    assert ledger.now()["staging"] == before


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize(
    "change",
    [
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        lambda weight: nn.init.constant_(weight, 0.5),
        lambda weight: torch.nn.functional.embedding(torch.tensor([1, 3]), weight, max_norm=0.1),
    ],
    ids=["uniform", "normal", "kaiming", "constant", "max_norm"],
)
def test_functions_that_write_by_themselves(change: Any, tmp_path: Path) -> None:
    """PyTorch hands them over as one call, which records gradients, and they switch that off inside."""
    model, weight = with_layer_on_drive(tmp_path)
    wanted = zinf_compile.full_state_dict(model)["encoder.layers.0.up.weight"].clone()
    for target in (weight, nn.Parameter(wanted)):
        torch.manual_seed(3)
        change(target)
    found = zinf_compile.full_state_dict(model)["encoder.layers.0.up.weight"]
    assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_a_parameter_beside_a_tensor_of_another_shape(tmp_path: Path) -> None:
    model, _ = with_layer_on_drive(tmp_path)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    gain = encoder.layers[0].get_parameter("gain")
    value = zinf_compile.full_state_dict(model)["encoder.layers.0.gain"].clone().requires_grad_()
    x = torch.randn(4, 16)
    for function in (lambda w: x * w, lambda w: w + x, lambda w: torch.where(x > 0, x, w)):
        gain.grad = value.grad = None
        found, expected = function(gain), function(value)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(gain.grad.full_tensor(), value.grad)  # type: ignore[attr-defined]
        with torch.no_grad():
            assert torch.equal(function(gain), expected)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_gradients_of_gradients_are_refused(tmp_path: Path) -> None:
    _, weight = with_layer_on_drive(tmp_path)
    loss = torch.nn.functional.linear(torch.ones(2, 16), weight).square().sum()
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
