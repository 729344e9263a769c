"""States that an optimizer keeps, or is given, only after its first step, where steps go in chunks: the numbers of eager."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, loss_of, tokens
from torch.optim import Optimizer
from training import BACKEND, adamw
from twin_models import Twins

from zinf_compile.errors import BudgetError
from zinf_compile.optim import lay_out_anew
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.host_shortage import Shortage

pytestmark = pytest.mark.keeps_graphs

Make = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(params=["nvme", "host", "all on nvme"])
def make_twins(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Make], Twins]]:
    """Return what makes an eager model and its twin, whose steps go in several chunks."""
    away: dict[str, Any] = {"optimizer": "host" if request.param == "host" else "nvme"}
    if request.param == "all on nvme":
        away |= {"params": "nvme", "grads": "nvme"}
    if request.param != "host":
        away["nvme"] = tmp_path

    def compiled(model: Any) -> Any:
        model.compile(backend=BACKEND, options={**away, "compute_shape": {"piece_numel": 128}})
        return model

    with simulating(SimulatedDevice()) if request.param == "host" else contextlib.nullcontext():
        yield lambda make: Twins(TiedWords, compiled, make)


def step(number: int) -> Callable[[Any, Optimizer], torch.Tensor]:
    def take(model: Any, optimizer: Optimizer) -> torch.Tensor:
        loss = loss_of(model(*tokens(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return take


def setting(**changed: Any) -> Callable[[Any, Optimizer], None]:
    return lambda _, optimizer: [group.update(changed) for group in optimizer.param_groups] and None  # type: ignore[func-returns-value]


def test_a_setting_that_is_switched_on(make_twins: Callable[[Make], Twins]) -> None:
    twins = make_twins(sgd)
    for number, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.0, 0.5)):
        twins.each(setting(momentum=momentum))
        twins.each(step(number))


def test_a_setting_that_is_switched_on_for_one_group(make_twins: Callable[[Make], Twins]) -> None:
    def grouped(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": rest}], lr=0.1)

    twins = make_twins(grouped)
    for number in range(4):
        if number == 2:
            twins.each(lambda _, optimizer: optimizer.param_groups[1].update(momentum=0.5))
        twins.each(step(number))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_states_that_are_loaded_and_were_not_kept_before(make: Make, make_twins: Callable[[Make], Twins]) -> None:
    twins = make_twins(make)
    more = {"momentum": 0.9} if make is sgd else {"amsgrad": True}
    for number in range(2):
        twins.each(step(number))

    def load(_: Any, optimizer: Optimizer) -> None:
        given = copy.deepcopy(optimizer.state_dict())
        name = "momentum_buffer" if make is sgd else "max_exp_avg_sq"
        shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
        for number, shape in enumerate(shapes):
            given["state"].setdefault(number, {})[name] = torch.full(shape, 0.01)
        for group in given["param_groups"]:
            group.update(more)
        optimizer.load_state_dict(given)

    twins.each(load)
    for number in range(2, 5):
        twins.each(step(number))


@pytest.mark.parametrize("make", [sgd, adamw])
def test_states_that_user_code_adds(make: Make, make_twins: Callable[[Make], Twins]) -> None:
    twins = make_twins(make)
    twins.each(step(0))

    @torch.no_grad()
    def add(_: Any, optimizer: Optimizer) -> None:
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p]["mine"] = torch.full(p.shape, float(number))
            optimizer.state[p]["count"] = torch.tensor(3.0)

    @torch.no_grad()
    def change(_: Any, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p]["mine"].mul_(2)

    for number in range(1, 4):
        if number == 1:
            twins.each(add)
        twins.each(step(number))
        twins.each(change)


def test_what_is_no_state_of_each_element_stays_as_it_is(make_twins: Callable[[Make], Twins]) -> None:
    twins = make_twins(adamw)
    twins.each(step(0))
    kept = {}
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        for name, p in model.named_parameters():
            optimizer.state[p]["own"] = kept[model, name] = torch.arange(3.0)
    for number in (1, 2):
        twins.each(step(number))
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        for name, p in model.named_parameters():
            assert optimizer.state[p]["own"] is kept[model, name]


def test_without_memory_nothing_is_changed(make_twins: Callable[[Make], Twins], monkeypatch: pytest.MonkeyPatch) -> None:
    twins = make_twins(adamw)
    for number in range(2):
        twins.each(step(number))

    def add(_: Any, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p]["mine"] = torch.ones(p.shape)

    def drop(_: Any, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                del optimizer.state[p]["mine"]

    twins.each(add)
    with monkeypatch.context() as patch:
        patch.setattr(lay_out_anew, "host_shortage", lambda context, needed: Shortage(7, "The smallest cap that works is 9"))
        loss_of(twins.call(*tokens(2))).backward()
        with pytest.raises(BudgetError, match=r"AdamW keeps more states than at first.* 7 bytes are available. The smallest cap"):
            twins.optimizers[1].step()
        twins.optimizers[1].zero_grad()
    twins.each(drop)
    twins.compare()
    for number in (2, 3):
        twins.each(step(number))
