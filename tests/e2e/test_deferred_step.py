"""Steps that end during the next forward: the numbers of eager, whatever a script does in between."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deferred_steps import Compile, both, check, compare, deferring, delay, is_late, step_on
from marks import more
from models import CASES, loss_of, tokens
from optimizers import OPTIMIZERS
from tiers import context_of, let_arrive, let_steps_end
from torch import nn
from torch.optim import Optimizer
from training import accumulating_step, assert_same, plain_step
from twin_models import Twins

import zinf_compile
from zinf_compile._torch import compile_lock
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.units.pending_updates import Updates

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.fixture(scope="module", params=["drive", "memory apart", "host apart", more("drive apart")])
def on_drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return what compiles a model so that its steps are deferred."""
    with deferring(request.param, tmp_path_factory.mktemp("drive")) as compile_it:
        yield compile_it


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, on_drive: Compile) -> None:
    sides = both(on_drive, OPTIMIZERS[name], steps=5)
    assert is_late(sides[1][1])
    check(sides)


@pytest.mark.parametrize("name", ["tied", "branches", "odd_shapes"])
def test_kinds_of_models(name: str, on_drive: Compile) -> None:
    """Units in pieces, tied, without a gradient in some steps."""
    case = CASES[name]
    sides = Twins(case.build, on_drive).sides
    for number in range(5):
        losses = [plain_step(model, optimizer, case.batch(number, 0)).detach() for model, optimizer in sides]
        assert_same("loss", *losses)
    compare(sides)


def test_accumulation_and_clipping(on_drive: Compile) -> None:
    sides = both(on_drive)
    for number in range(2, 5):
        losses = [accumulating_step(model, optimizer, tokens(number)).detach() for model, optimizer in sides]
        assert_same("loss", *losses)
    check(sides)


def test_the_first_step_and_those_with_gradients_in_memory_end_at_once(on_drive: Compile) -> None:
    sides = both(on_drive, steps=1)
    assert not is_late(sides[1][1])
    step_on(sides, 1)
    assert is_late(sides[1][1])
    for model, optimizer in sides:
        optimizer.zero_grad()
        loss_of(model(*tokens(2))).backward()
        parameter = next(model.parameters())
        parameter.grad = torch.ones_like(parameter, requires_grad=False)
        optimizer.step()
    assert not is_late(sides[1][1])
    check(sides)


class Norms(nn.Module):
    """Layers that end with a norm, which autocast leaves in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(192, 192), nn.LayerNorm(192)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_small_parameters_of_all_layers_are_updated_first(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather brings those that autocast leaves in full precision: updated with their layers, it waits for a whole step."""
    model = on_drive(Norms())
    optimizer, updated = torch.optim.AdamW(model.parameters()), list[int]()
    really = Updates.updated

    def noted(updates: Updates, unit: Any, *args: Any) -> None:
        updated.append(unit.numel)
        really(updates, unit, *args)

    for number in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 192)).square().mean()
        loss.backward()
        let_arrive(model)
        if number:
            monkeypatch.setattr(Updates, "updated", noted)
        optimizer.step()
        optimizer.zero_grad()
    let_steps_end()
    assert [id(parameter) for parameter in optimizer.state] == list(map(id, model.parameters())), "eager's order all the same"
    assert updated == sorted(updated)
    assert set(updated) == {192, 192 * 192}


def test_a_forward_is_handed_what_is_updated(on_drive: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step returns before its update; the forward begins before it, and reads nothing that the update has."""
    sides = both(on_drive, steps=1)
    model = sides[1][0]
    asked = threading.Event()

    def noting(really: Callable[..., Any]) -> Callable[..., Any]:
        def read(updates: Updates, *args: Any) -> Any:
            arriving = really(updates, *args)
            asked.set()
            return arriving

        return read

    for name in ("read", "arrival", "begin_after"):
        monkeypatch.setattr(Updates, name, noting(getattr(Updates, name)))

    def wait_for_the_forward() -> None:
        assert asked.wait(60)

    context_of(model).lanes.update.submit(wait_for_the_forward)
    step_on(sides, 1)
    unit = next(p._zinf_unit for p in model.parameters())  # type: ignore[union-attr,attr-defined]
    updates = unit.updates
    assert updates._left
    step_on(sides, 2)
    assert updates.spared_bytes or not unit.on_drive
    check(sides)


def change_settings(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=3.0, betas=(0.1, 0.2), weight_decay=0.5)


def scale_tensor_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.1)


def zero_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def change_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(7.0).add_(1.0)  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def accumulate_on(model: nn.Module, optimizer: Optimizer) -> None:
    loss_of(model(*tokens(7))).backward()


def step_again(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def evaluate(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        model(*tokens(8))


def save_and_load(model: nn.Module, optimizer: Optimizer) -> None:
    saved = copy.deepcopy(zinf_compile.full_state_dict(model)), copy.deepcopy(optimizer.state_dict())
    plain_step(model, optimizer, tokens(8))
    zinf_compile.load_full_state_dict(model, saved[0])
    optimizer.load_state_dict(saved[1])


def change_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    with zinf_compile.gathered(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def change_at_hand(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def change_states(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


def compile_another(model: nn.Module, optimizer: Optimizer) -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    other.compile(backend="zero_infinity_fx")
    other(torch.ones(2, 3)).sum().backward()


def other_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


BETWEEN = [
    change_settings,
    zero_in_place,
    change_gradients,
    accumulate_on,
    step_again,
    evaluate,
    save_and_load,
    change_parameters,
    change_at_hand,
    change_states,
    compile_another,
    other_parameters,
]


@pytest.mark.parametrize("act", BETWEEN)
def test_what_happens_after_the_step_does_not_change_it(act: Callable[..., None], on_drive: Compile) -> None:
    """Begun while the update is held back: those that need it wait for it, the others leave it alone."""
    sides = both(on_drive)
    for number in range(2, 4):
        for model, optimizer in sides:
            optimizer.zero_grad()
            loss_of(model(*tokens(number))).backward()
        zinf_compile.synchronize()
        delay(sides[1][0])
        for _, optimizer in sides:
            optimizer.step()
        assert is_late(sides[1][1])
        for model, optimizer in sides:
            act(model, optimizer)
    check(sides)


def test_a_tensor_for_a_rate(on_drive: Compile) -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.05), fused=True)

    sides = both(on_drive, make)
    for number in range(2, 5):
        for model, optimizer in sides:
            scale_tensor_rate(model, optimizer)
        step_on(sides, number)
    check(sides)


def test_a_scaler_whose_scale_changes_right_after_the_step(on_drive: Compile) -> None:
    """A fused optimizer is given the scale, and divides by it."""
    sides = both(on_drive)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in sides]
    for number in range(2, 6):
        zinf_compile.synchronize()
        delay(sides[1][0])
        for (model, optimizer), scaler in zip(sides, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(*tokens(number)))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert is_late(sides[1][1])
    assert scalers[1].get_scale() == scalers[0].get_scale() == 8.0 * 2**4
    compare(sides)


def test_settings_that_a_step_changes(on_drive: Compile) -> None:
    """Counts them up in its group, once a step; what a schedule sets stays."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                group["lr"] *= 0.5
            return super().step(closure)

    def make(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return Counting([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9)

    sides = both(on_drive, make, steps=4)
    for _, optimizer in sides:
        optimizer.param_groups[1]["lr"] = 0.3
    check(sides)
    assert [group["count"] for group in sides[1][1].param_groups] == [5, 5]


def test_two_optimizers_of_the_same_parameters(on_drive: Compile) -> None:
    sides = both(on_drive)
    others = [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5) for model, _ in sides]
    for number in range(2, 6):
        for (model, optimizer), other in zip(sides, others, strict=True):
            optimizer.zero_grad()
            loss_of(model(*tokens(number))).backward()
            optimizer.step()
            other.step()
    check(sides)


def test_who_has_an_alias_sees_the_step_at_once(on_drive: Compile) -> None:
    """A tensor of the memory of a parameter, a gradient or a state: then nothing is left for later."""
    sides = both(on_drive)
    units = [p._zinf_unit for p in sides[1][0].parameters()]  # type: ignore[union-attr,attr-defined]
    held: list[Callable[[nn.Parameter, Optimizer], torch.Tensor]] = [
        lambda parameter, optimizer: parameter.detach(),
        lambda parameter, optimizer: optimizer.state[parameter]["exp_avg"],
    ]
    held += [] if units[0].placement.grads != "device" else [lambda parameter, _: parameter.grad.view(-1)]  # type: ignore[union-attr]
    for hold in held:
        aliases = []
        for model, optimizer in sides:
            optimizer.zero_grad()
            loss_of(model(*tokens(3))).backward()
            aliases.append(hold(next(model.parameters()), optimizer))
            optimizer.step()
        assert_same("what was held", *aliases)
        for alias in aliases:
            alias.zero_()
        del aliases, alias
    check(sides)


def test_gradients_of_two_steps_are_never_there_at_once(on_drive: Compile) -> None:
    """A backward begins when those of the step before are applied, however long that takes."""
    sides = both(on_drive, steps=1)
    model = sides[1][0]
    memory = context_of(model).memory
    ledgers, kept = {memory.ledger, memory.host_ledger}, next(p._zinf_unit for p in model.parameters()).placement.grads  # type: ignore[union-attr,attr-defined]
    before = [ledger.peak()["grads"] for ledger in ledgers]
    for number in range(1, 4):
        zinf_compile.synchronize()
        delay(model)
        step_on(sides, number)
    assert [ledger.peak()["grads"] for ledger in ledgers] == before or not kept.in_memory
    check(sides)


def test_an_optimizer_may_go_while_its_step_is_left(on_drive: Compile) -> None:
    sides = both(on_drive)
    models = [model for model, _ in sides]
    gone = [weakref.ref(optimizer) for _, optimizer in sides]
    sides.clear()
    gc.collect()
    whole = zinf_compile.full_state_dict(models[1])
    for name, value in models[0].state_dict().items():
        assert_same(name, value, whole[name])
    let_steps_end()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_nothing_is_updated_while_dynamo_compiles(on_drive: Compile) -> None:
    """Optimizers that aren't fused go by `torch.compiler.is_compiling()`, which is true in all threads then."""

    def make(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, foreach=False)

    sides = both(on_drive, make)
    zinf_compile.synchronize()
    for model, optimizer in sides:
        optimizer.zero_grad()
        loss_of(model(*tokens(2))).backward()
    with compile_lock:
        for _, optimizer in sides:
            optimizer.step()
        unit = next(p._zinf_unit for p in sides[1][0].parameters() if p._zinf_unit.updates)  # type: ignore[union-attr,attr-defined]
        left = len(unit.updates._left)
        time.sleep(0.2)
        assert left == len(unit.updates._left) > 0
        with pytest.raises(PartitionedParameterError, match="while a graph is compiled"):
            unit.wait_updated()
    for model, _ in sides:
        with torch.no_grad():
            model(*tokens(3))
    check(sides)


def test_gradients_are_let_go_of_as_they_are_applied(on_drive: Compile) -> None:
    """One place for each gradient is enough for a loop that doesn't accumulate."""
    sides = both(on_drive, steps=6)
    check(sides)
    rooms = {p._zinf_unit.gradient_pool[0] for p in sides[1][0].parameters() if p._zinf_unit.gradient_pool}  # type: ignore[union-attr,attr-defined]
    assert all(len({id(shards) for free in room._free for shards in free}) <= 1 for room in rooms)
