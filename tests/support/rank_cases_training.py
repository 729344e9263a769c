"""What several ranks do between backward and step: clipping, scaling, hooks, accumulation, optimizer states."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from models import CASES, Mlp, OddShapes, vectors
from rank_compare import Expected, Ranks, adamw, add_gradients, assert_equal, backward, compare_training, compare_values
from torch import nn

import zinf_compile


def loss_of_vectors(model: Any, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a model of `vectors`."""
    loss: torch.Tensor = model(*vectors(step, rank))
    return loss


def gradients(ranks: Ranks, build: Any = OddShapes) -> tuple[Any, Any, dict[str, Expected]]:
    """Return a model with gradients, its compiled form, and what eager's are."""
    torch.manual_seed(7)
    model = build()
    eager = [copy.deepcopy(model) for _ in range(ranks.size)]
    for rank, m in enumerate(eager):
        backward(loss_of_vectors, m, rank, 0)
    expected: dict[str, Expected] = {}
    add_gradients(expected, eager)
    compiled = ranks.compile(model)
    backward(loss_of_vectors, compiled, ranks.rank, 0)
    return model, compiled, expected


def accumulation(ranks: Ranks) -> None:
    compare_training(ranks, Mlp, loss_of_vectors, micro_steps=3, steps=2)


def accumulation_onto_zeros(ranks: Ranks) -> None:
    """`zero_grad(set_to_none=False)` keeps the gradient objects, and the next backward adds to them."""
    model, compiled, expected = gradients(ranks)
    kept = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    for grad in kept.values():
        assert not grad.full_tensor().any()
    backward(loss_of_vectors, compiled, ranks.rank, 0)
    for name, p in model.named_parameters():
        assert p.grad is kept[name]
        assert_equal(p.grad.full_tensor(), expected[name].mean, name)


def backward_twice(ranks: Ranks) -> None:
    model, compiled, expected = gradients(ranks)
    model.zero_grad()
    loss = loss_of_vectors(compiled, ranks.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    for name, p in model.named_parameters():
        assert_equal(p.grad.full_tensor(), expected[name].mean + expected[name].mean, name)


def clip_by_global_norm(ranks: Ranks) -> None:
    model, compiled, expected = gradients(ranks)
    for kind in (2.0, 1.0, 3.0, math.inf):
        for foreach in (None, False, True):
            model.zero_grad()
            backward(loss_of_vectors, compiled, ranks.rank, 0)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25, norm_type=kind, foreach=foreach)
            whole = nn.utils.get_total_norm([e.mean for e in expected.values() if e.mean.numel()], norm_type=kind)
            torch.testing.assert_close(norm, whole, rtol=4e-7, atol=0.0)
            for name, p in model.named_parameters():
                wanted = expected[name].mean * (0.25 / (norm + 1e-6)).clamp(max=1.0)
                assert_equal(p.grad.full_tensor(), wanted, f"{name}, norm {kind}, foreach {foreach}")


def clip_norm_that_is_not_finite(ranks: Ranks) -> None:
    """Infinite in one element, which one rank holds: all ranks raise, and nothing is changed."""
    model, _, expected = gradients(ranks, Mlp)
    if ranks.rank == ranks.size - 1:
        model.first.weight.grad.local()[0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.25, error_if_nonfinite=True)
    assert_equal(model.second.weight.grad.full_tensor(), expected["second.weight"].mean, "an unclipped gradient")


def clip_by_value(ranks: Ranks) -> None:
    model, compiled, expected = gradients(ranks)
    for foreach in (None, False, True):
        model.zero_grad()
        backward(loss_of_vectors, compiled, ranks.rank, 0)
        nn.utils.clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
        for name, p in model.named_parameters():
            assert_equal(p.grad.full_tensor(), expected[name].mean.clamp(-0.02, 0.02), f"{name}, foreach {foreach}")


def scaler_finds_inf_on_one_rank(ranks: Ranks) -> None:
    """The step is left out, and the scale halved, on every rank; the next step is eager's."""
    torch.manual_seed(7)
    model = Mlp()
    eager = [copy.deepcopy(model) for _ in range(ranks.size)]
    compiled, optimizer = ranks.compile(model), adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(model: Any, rank: int, step: int) -> torch.Tensor:
        return loss_of_vectors(model, rank, step) * scaler.get_scale()

    scaler.scale(torch.ones(()))  # makes the scale
    for step, poisoned in enumerate((True, False, False)):
        scale = scaler.get_scale()
        for rank, m in enumerate(eager):
            backward(scaled, m, rank, step)
        expected: dict[str, Expected] = {}
        add_gradients(expected, eager)
        backward(scaled, compiled, ranks.rank, step)
        if poisoned and ranks.rank == ranks.size - 1:
            model.second.bias.grad.local()[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (scale / 2 if poisoned else scale)
        if step == 0:
            own = adamw(eager[ranks.rank])
        else:
            for name, p in eager[ranks.rank].named_parameters():
                p.grad = expected[name].mean * torch.tensor(scale).double().reciprocal().float()
            own.step()
            for m in eager:
                m.load_state_dict(eager[ranks.rank].state_dict())
                m.zero_grad()
        compare_values(model, eager[ranks.rank], f"step {step}")


def hooks(ranks: Ranks) -> None:
    """Hooks on parameters see averaged gradients, and what they return counts."""
    model, compiled, expected = gradients(ranks)
    model.zero_grad()
    seen: list[str] = []
    for name, p in model.named_parameters():
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    backward(loss_of_vectors, compiled, ranks.rank, 0)
    assert sorted(seen) == sorted(expected)
    for name, p in model.named_parameters():
        assert_equal(p.grad.full_tensor(), expected[name].mean * 2, name)


def gradients_without_backward(ranks: Ranks) -> None:
    """`torch.autograd.grad` returns what backward would add, and `backward(inputs=...)` writes those gradients only."""
    model, compiled, expected = gradients(ranks)
    model.zero_grad()
    found = torch.autograd.grad(loss_of_vectors(compiled, ranks.rank, 0), list(model.parameters()))
    for (name, p), grad in zip(model.named_parameters(), found, strict=True):
        assert p.grad is None
        assert_equal(grad.full_tensor(), expected[name].mean, name)  # type: ignore[attr-defined]
    loss_of_vectors(compiled, ranks.rank, 0).backward(inputs=[model.conv.weight])
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["conv.weight"]
    assert_equal(model.conv.weight.grad.full_tensor(), expected["conv.weight"].mean, "conv.weight")


def closures(ranks: Ranks) -> None:
    """`optimizer.step(closure)` steps on the closure's gradients. The model has run before."""
    torch.manual_seed(7)
    model = Mlp()
    eager = [copy.deepcopy(model) for _ in range(ranks.size)]
    compiled, optimizer, own = ranks.compile(model), adamw(model), adamw(eager[ranks.rank])
    backward(loss_of_vectors, compiled, ranks.rank, 0)
    for step in range(3):
        optimizer.zero_grad()
        loss = optimizer.step(lambda step=step: backward(loss_of_vectors, compiled, ranks.rank, step))
        values = [backward(loss_of_vectors, m, rank, step) for rank, m in enumerate(eager)]
        expected: dict[str, Expected] = {}
        add_gradients(expected, eager)
        for name, p in eager[ranks.rank].named_parameters():
            p.grad = expected[name].mean
        own.step()
        for m in eager:
            m.load_state_dict(eager[ranks.rank].state_dict())
            m.zero_grad()
        assert_equal(loss, values[ranks.rank], f"loss of step {step}")
        compare_values(model, eager[ranks.rank], f"step {step}")


def fused_adamw(ranks: Ranks) -> None:
    """The fused kernel rounds otherwise in the last few elements of a shard, which it doesn't take as a vector.

    Its update is then another order of a dozen roundings of numbers of the size of the parameter and the learning rate.
    """
    torch.manual_seed(7)
    model = Mlp()
    eager = copy.deepcopy(model)
    compiled = ranks.compile(model)
    steppers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, eager)]
    for step in range(3):
        backward(loss_of_vectors, compiled, ranks.rank, step)
        for name, p in model.named_parameters():
            eager.get_parameter(name).grad = p.grad.full_tensor()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    with zinf_compile.gathered(model):
        for name, p in model.named_parameters():
            wanted = eager.get_parameter(name).detach()
            bound = 3 * 12 * torch.finfo(torch.float32).eps * (wanted.abs() + 0.01)
            assert ((p.detach() - wanted).abs() <= bound).all(), name


def eager_optimizer_state_loaded(ranks: Ranks) -> None:
    """A whole state, from eager training, is loaded before the first step and goes on as eager's does."""
    torch.manual_seed(7)
    eager = CASES["odd_shapes"].build()
    trained = adamw(eager)
    for step in range(2):
        backward(loss_of_vectors, eager, 0, step)
        trained.step()
        trained.zero_grad()
    model = OddShapes()
    model.load_state_dict(eager.state_dict())
    optimizer = adamw(model)
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    compiled = ranks.compile(model)
    for step in range(2, 4):
        backward(loss_of_vectors, compiled, ranks.rank, step)
        for name, p in model.named_parameters():
            eager.get_parameter(name).grad = p.grad.full_tensor()
        for o in (optimizer, trained):
            o.step()
            o.zero_grad()
        compare_values(model, eager, f"step {step}")


def own_optimizer_state_loaded(ranks: Ranks) -> None:
    """Each rank's own state, saved between steps, brings a run back to where it was."""
    torch.manual_seed(7)
    model = Mlp()
    compiled, optimizer = ranks.compile(model), adamw(model)

    def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            backward(loss_of_vectors, compiled, ranks.rank, step)
            optimizer.step()
            optimizer.zero_grad()

    assert optimizer.state_dict()["state"] == {}
    train(optimizer, range(2))
    weights, state = zinf_compile.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
    shards = [-(-p.numel() // ranks.size) for p in model.parameters()]
    assert [state["state"][i]["exp_avg"].numel() for i in range(len(shards))] == shards
    train(optimizer, range(2, 4))
    wanted = zinf_compile.full_state_dict(model)
    zinf_compile.load_full_state_dict(model, weights)
    resumed = adamw(model)
    resumed.load_state_dict(state)
    train(resumed, range(2, 4))
    found = zinf_compile.full_state_dict(model)
    for name, value in wanted.items():
        assert_equal(found[name], value, name)


def model_beside_that_is_not_compiled(ranks: Ranks) -> None:
    """An optimizer warns of a model that no compiled graph touches: its gradients are this rank's own."""
    torch.manual_seed(7)
    model, other = Mlp(), nn.Linear(3, 5)
    compiled, optimizer = ranks.compile(model), adamw(nn.ModuleList([model, other]))
    for step in range(2):
        backward(loss_of_vectors, compiled, ranks.rank, step)
        other(torch.ones(3)).sum().backward()
        if step == 0:
            with pytest.warns(UserWarning, match=r"2 parameters of this AdamW .*\[5, 3\].* not averaged over the 2 ranks"):
                optimizer.step()
        else:
            optimizer.step()  # warns once: a second warning would raise here
