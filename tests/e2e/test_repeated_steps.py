"""Steps that repeat the last one run on its stand-in; whatever changes in between, they are eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from versions import guards_requires_grad

import zinf_compile
from zinf_compile.optim.record import LAST

Change = Callable[[Optimizer, nn.Sequential], None]


def nothing(optimizer: Optimizer, model: nn.Sequential) -> None:
    pass


def rate(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def implementation(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0].update(fused=False, foreach=True)


def attribute(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as a scaler's: the step changes nothing


def fewer(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"].pop()


def regrouped(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.01})


def reversed_order(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"].reverse()


def other_groups(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups = [{**group, "lr": 0.02} for group in optimizer.param_groups]


def without_gradient(optimizer: Optimizer, model: nn.Sequential) -> None:
    model[0].weight.grad = None


def own_gradient(optimizer: Optimizer, model: nn.Sequential) -> None:
    model[0].weight.grad = torch.full((10, 6), 0.5)


def written(optimizer: Optimizer, model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def other_memory(optimizer: Optimizer, model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.detach() * 0.5


def frozen(optimizer: Optimizer, model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = None


def reset(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.state.clear()


def one_state(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.state[model[0].weight]["exp_avg"] = torch.ones(10, 6)


def one_state_fewer(optimizer: Optimizer, model: nn.Sequential) -> None:
    del optimizer.state[model[0].weight]


def loaded(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def of_no_parameter(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.state["all"] = {"steps": 3}  # type: ignore[index]


def raising(optimizer: Optimizer, model: nn.Sequential) -> None:
    def hook(*args: Any) -> None:
        raise ZeroDivisionError

    handle = optimizer.register_step_pre_hook(hook)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()


def by_closure(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type]


def train(change: Change, *, compiled: bool, when: tuple[int, ...] = (4,)) -> tuple[list[Any], Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    call: Any = (
        torch.compile(model, backend="zero_infinity", options={"compute": "fx", "params": "device"}) if compiled else model
    )
    for step in range(8):
        optimizer.zero_grad()
        call(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        if step in when:
            change(optimizer, model)
            if change is frozen and not guards_requires_grad:
                torch.compiler.reset()
        optimizer.step()
        if step in when and change is attribute:
            del optimizer.found_inf  # type: ignore[attr-defined]
    states = [(name, value) for p in model.parameters() for name, value in optimizer.state[p].items()]
    return [*((None, p.detach().clone()) for p in model.parameters()), *states], optimizer


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        rate,
        implementation,
        attribute,
        fewer,
        regrouped,
        reversed_order,
        other_groups,
        without_gradient,
        own_gradient,
        written,
        other_memory,
        frozen,
        reset,
        one_state,
        one_state_fewer,
        loaded,
        of_no_parameter,
        raising,
        by_closure,
    ],
)
def test_what_changes_between_two_steps(change: Change) -> None:
    found, optimizer = train(change, compiled=True)
    expected, _ = train(change, compiled=False)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        assert torch.equal(value, wanted), name
    repeats = vars(optimizer).get(LAST) is not None
    assert repeats == (change not in (fewer, of_no_parameter))  # states of what the optimizer has no longer, or never had


def test_states_of_another_parameter_are_noticed() -> None:
    """Equal shapes, so that only who has them tells."""

    def swap(optimizer: Optimizer, model: nn.Sequential) -> None:
        first, second = model[0].bias, model[2].bias
        optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]

    found, _ = train(swap, compiled=True, when=(4, 6))
    expected, _ = train(swap, compiled=False, when=(4, 6))
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        assert torch.equal(value, wanted), name


def test_equal_steps_have_one_stand_in() -> None:
    ids: list[Any] = []
    train(lambda optimizer, model: ids.append(vars(optimizer).get(LAST)), compiled=True, when=(2, 3, 5, 7))
    assert ids[0] is not None
    assert all(last is ids[0] for last in ids)


def test_replaced_states_are_freed() -> None:
    gone: list[Any] = []

    def load(optimizer: Optimizer, model: nn.Sequential) -> None:
        assert vars(optimizer).get(LAST) is not None
        gone.append(weakref.ref(optimizer.state[model[0].weight]["exp_avg"]))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        gc.collect()
        assert gone[-1]() is None

    train(load, compiled=True, when=(4, 7))
    assert len(gone) == 2


def test_reset_lets_go_of_the_last_step() -> None:
    _, optimizer = train(nothing, compiled=True)
    assert vars(optimizer).get(LAST) is not None
    zinf_compile.reset()
    assert vars(optimizer).get(LAST) is None


def test_an_optimizer_that_refers_to_itself_is_collected() -> None:
    def made() -> list[Any]:
        _, optimizer = train(nothing, compiled=True)
        optimizer.register_step_post_hook(lambda *args: optimizer.param_groups)
        optimizer.param_groups[0]["params"][0].owner = optimizer
        assert vars(optimizer).get(LAST) is not None
        return [weakref.ref(optimizer), weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])]

    gone = made()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.filterwarnings("ignore:all 2 parameters")
def test_parameters_that_begin_to_be_trained() -> None:
    """Gradual unfreezing: what was frozen and had no states is updated in other types than the rest."""
    values = []
    for forget in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10).bfloat16(), nn.Tanh(), nn.Linear(10, 3).bfloat16(), nn.Tanh(), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

        class Mixed(nn.Module):
            def __init__(self, inner: nn.Sequential) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.inner[4](self.inner[:4](x.bfloat16()).float())
                return out

        call: Any = torch.compile(Mixed(model), backend="zero_infinity", options={"compute": "fx", "master": "float32"})
        for step in range(7):
            if step == 4:
                model[0].requires_grad_(True)
                if not guards_requires_grad:
                    torch.compiler.reset()
            optimizer.zero_grad()
            call(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            if forget:
                vars(optimizer).pop(LAST, None)
            optimizer.step()
        values.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))
