"""One rank, all on the device, nothing to move: parameters stay ordinary ones, and train as eager ones, bit by bit."""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Case, Mlp, loss_of, vectors
from torch import nn
from training import BACKEND, adamw, assert_same, assert_same_models, plain_step, train_both, train_step_on, twins

import zinf_compile
from zinf_compile.backend.entry import zero_infinity
from zinf_compile.runtime.system import host_limits
from zinf_compile.sharded import ordinary
from zinf_compile.sharded.parameter import ShardedParameter

FX = {"compute": "fx"}


def as_a_user(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="zero_infinity", options={**FX, **options})


def types_of(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("name", CASES)
def test_parameters_stay_ordinary(name: str) -> None:
    case = CASES[name]
    everything = {name for name, _ in case.build().named_parameters()}
    _, ours = train_both(case, compiled=as_a_user, whole=everything)
    assert types_of(ours) == {nn.Parameter}
    assert zinf_compile.stats(ours) == {}
    assert zinf_compile.memory(ours) == {"now": {}, "peak": {}}


def test_any_number_of_rows_is_compiled_for() -> None:
    seen = []

    def counting(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return zero_infinity(gm, inputs, options=FX)

    def rows(step: int, rank: int = 0) -> tuple[Any, ...]:
        return vectors(step, rank, rows=3 + step)

    everything = {name for name, _ in Mlp().named_parameters()}
    train_both(Case(Mlp, rows), compiled=lambda model: torch.compile(model, backend=counting), whole=everything, steps=4)
    assert len(seen) == 2, "once for the first, once for any"


@pytest.mark.parametrize(
    "option", [{"machine": "h100"}, {"nvme": ()}, {"mode": "default"}], ids=lambda option: next(iter(option))
)
def test_an_option_that_places_nothing_partitions_nothing(option: dict[str, Any]) -> None:
    everything = {name for name, _ in Mlp().named_parameters()}
    _, ours = train_both(CASES["mlp"], compiled=lambda model: as_a_user(model, **option), steps=1, whole=everything)
    assert types_of(ours) == {nn.Parameter}


def test_a_machine_that_is_not_known_is_refused_though_nothing_depends_on_it() -> None:
    with pytest.raises(zinf_compile.PlanError, match="machine 'foo' is no shipped profile"):
        as_a_user(Mlp(), machine="foo")(*vectors(0))


@pytest.mark.parametrize(
    "option",
    [{"params": "device"}, {"bucket": "1MiB"}, {"device_memory": "1GiB"}, {"tile": "1MiB"}, {"host_memory": "8GiB"}],
    ids=lambda option: next(iter(option)),
)
def test_any_other_option_partitions(option: dict[str, Any]) -> None:
    _, ours = train_both(CASES["mlp"], compiled=lambda model: as_a_user(model, **option), steps=1)
    assert types_of(ours) == {ShardedParameter}


def test_with_a_drive_everything_that_fits_stays_ordinary(tmp_path: Path) -> None:
    """Homes are decided, and nothing moves; another number of rows changes nothing about that."""
    everything = {name for name, _ in Mlp().named_parameters()}

    def rows(step: int, rank: int = 0) -> tuple[Any, ...]:
        return vectors(step, rank, rows=3 + step)

    _, ours = train_both(
        Case(Mlp, rows), compiled=lambda model: as_a_user(model, nvme=tmp_path, timeout_s=60.0), whole=everything, steps=3
    )
    assert types_of(ours) == {nn.Parameter}


def test_with_a_drive_what_does_not_fit_is_partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lambda: nn.Sequential(nn.Linear(7, 640), nn.Linear(640, 640)), lambda step, rank: vectors(step)[:1])
    whole = sum(parameter.nbytes for parameter in case.build().parameters())
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 4 * whole)
    eager, ours = twins(case.build)
    call = as_a_user(ours, nvme=tmp_path)
    for model, run in ((eager, eager), (ours, call)):
        run(*case.batch(0, 0)).square().mean().backward()
        adamw(model.parameters()).step()
    assert_same_models(eager, ours)
    assert types_of(ours) == {ShardedParameter}


def test_what_fits_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all on the device would lack least: a drive needs staging."""
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 100)
    eager, ours = twins(Mlp)
    with pytest.raises(zinf_compile.BudgetError):
        as_a_user(ours, nvme=tmp_path)(*vectors(0))
    assert_same_models(eager, ours)


def test_a_drive_is_used_by_a_model_that_was_ordinary(tmp_path: Path) -> None:
    """Where a cap comes with it."""
    eager, ours = twins(Mlp)
    optimizer, our_optimizer = adamw(eager.parameters()), adamw(ours.parameters())
    calls = [as_a_user(ours, nvme=tmp_path), as_a_user(ours, nvme=tmp_path, device_memory="1GiB")]
    for number, call in enumerate([calls[0], calls[1], calls[0]]):
        train_step_on([(eager, optimizer), (call, our_optimizer)], [eager, ours], plain_step, vectors(number), number)
        assert types_of(ours) == {ShardedParameter if number else nn.Parameter}


def test_one_rank_of_a_process_group_is_one_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        test_parameters_stay_ordinary("mlp")
    finally:
        dist.destroy_process_group()


def test_what_is_partitioned_stays_so(tmp_path: Path) -> None:
    eager, _ = twins(Mlp)
    torch.manual_seed(7)
    with zinf_compile.partitioned(params="nvme", nvme=tmp_path):
        ours = Mlp()
    sides = [(eager, adamw(eager.parameters())), (as_a_user(ours), adamw(ours.parameters()))]
    for number in range(2):
        train_step_on(sides, [eager, ours], plain_step, vectors(number), number)
    assert types_of(ours) == {ShardedParameter}


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_an_option_given_later_partitions_what_was_trained(tier: str, tmp_path: Path) -> None:
    """States, and a gradient of the micro-batch before, go along; the graph without options serves partitioned ones then."""
    eager, ours = twins(Mlp)
    optimizer, our_optimizer = adamw(eager.parameters()), adamw(ours.parameters())
    first = as_a_user(ours)
    words = dict.fromkeys(("params", "grads", "optimizer"), tier)
    second = as_a_user(ours, **words, **({"nvme": tmp_path} if tier == "nvme" else {}))
    for number, call in enumerate([first, first, second, first]):
        train_step_on([(eager, optimizer), (call, our_optimizer)], [eager, ours], plain_step, vectors(number), number)
        assert types_of(ours) == {nn.Parameter if number < 2 else ShardedParameter}
    optimizer.zero_grad()
    our_optimizer.zero_grad()
    for call in (first, second):
        loss_of(eager(*vectors(5))).backward()
        loss_of(call(*vectors(5))).backward()
    optimizer.step()
    our_optimizer.step()
    assert_same_models(eager, ours)


def test_a_gradient_made_before_is_added_to(tmp_path: Path) -> None:
    eager, ours = twins(Mlp)
    optimizer, our_optimizer = adamw(eager.parameters()), adamw(ours.parameters())
    for call in (as_a_user(ours), as_a_user(ours, params="nvme", nvme=tmp_path)):
        loss_of(eager(*vectors(1))).backward()
        loss_of(call(*vectors(1))).backward()
    assert types_of(ours) == {ShardedParameter}
    optimizer.step()
    our_optimizer.step()
    assert_same_models(eager, ours)


def test_two_models_one_of_which_is_partitioned(tmp_path: Path) -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5)))
    calls = [as_a_user(ours[0]), as_a_user(ours[1], params="nvme", nvme=tmp_path)]
    sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
    for number in range(3):
        x, y = vectors(number)
        for forward, optimizer in ((eager, sides[0][1]), (lambda x: calls[1](calls[0](x)), sides[1][1])):
            optimizer.zero_grad()
            nn.functional.mse_loss(forward(x), y).backward()
            optimizer.step()
        assert_same_models(eager, ours)
    assert [types_of(part) for part in ours] == [{nn.Parameter}, {ShardedParameter}]


def test_a_partitioned_model_beside_one_that_is_not_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They share a parameter."""
    whole, part = Mlp(), nn.Linear(7, 13)
    whole.first = part
    optimizer = adamw(whole.parameters())
    loss_of(as_a_user(whole)(*vectors(0))).backward()
    on_drive = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
    as_a_user(part, **on_drive, nvme=tmp_path)(vectors(0)[0]).sum().backward()
    optimizer.step()
    assert types_of(whole) == {nn.Parameter, ShardedParameter}
    assert "no compiled graph uses" not in caplog.text


def test_a_checkpoint_goes_to_a_partitioned_model_and_back(tmp_path: Path) -> None:
    eager, ours = twins(Mlp)
    optimizer, our_optimizer = adamw(eager.parameters()), adamw(ours.parameters())
    train_step_on([(eager, optimizer), (as_a_user(ours), our_optimizer)], [eager, ours], plain_step, vectors(0), 0)
    zinf_compile.save(tmp_path / "first", ours, our_optimizer)
    torch.compiler.reset()
    _, moved = twins(Mlp, seed=1)
    moved_optimizer = adamw(moved.parameters())
    call = as_a_user(moved, **dict.fromkeys(("params", "optimizer"), "nvme"), nvme=tmp_path)
    zinf_compile.load(tmp_path / "first", moved, moved_optimizer)
    train_step_on([(eager, optimizer), (call, moved_optimizer)], [eager, moved], plain_step, vectors(1), 1)
    assert types_of(moved) == {ShardedParameter}
    zinf_compile.save(tmp_path / "second", moved, moved_optimizer)
    torch.compiler.reset()
    _, back = twins(Mlp, seed=2)
    back_optimizer = adamw(back.parameters())
    zinf_compile.load(tmp_path / "second", back, back_optimizer)
    train_step_on([(eager, optimizer), (as_a_user(back), back_optimizer)], [eager, back], plain_step, vectors(2), 2)
    assert types_of(back) == {nn.Parameter}


def test_what_is_handed_out_is_the_parameter_itself() -> None:
    class HandsOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.linear.weight.t()

    model = HandsOut()
    _, view = as_a_user(model)(torch.ones(2, 7))
    assert view.untyped_storage().data_ptr() == model.linear.weight.untyped_storage().data_ptr()


def test_it_is_said_and_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp()
    optimizer = adamw(model.parameters())
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "zinf_compile"):
        warnings.simplefilter("error")
        plain_step(as_a_user(model), optimizer, vectors(0))
    assert "parameters stay ordinary ones: on one rank, with these options, nothing moves" in caplog.text


def test_a_timeline_says_that_nothing_moves() -> None:
    model = Mlp()
    plain_step(as_a_user(model), adamw(model.parameters()), vectors(0))
    for ask in (lambda: zinf_compile.timeline(model), lambda: zinf_compile.report_steps(model, every=1)):
        with pytest.raises(zinf_compile.OptionError, match=r'nothing of this Mlp moves.*device_memory="8GiB"'):
            ask()


def test_what_is_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that would let it train, before anything is compiled; the model is as it was."""
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 100)
    eager, ours = twins(Mlp)
    with pytest.raises(zinf_compile.BudgetError, match=r"the model needs .* bytes on cpu.*nvme"):
        as_a_user(ours)(*vectors(0))
    assert_same_models(eager, ours)
    assert types_of(ours) == {nn.Parameter}


def test_what_has_no_room_for_states_is_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the step says what is missing, and with which options there is room."""
    _, ours = twins(Mlp)
    whole = sum(parameter.nbytes for parameter in ours.parameters())
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 2 * whole)
    loss_of(as_a_user(ours)(*vectors(0))).backward()
    assert types_of(ours) == {ShardedParameter}


def test_an_evaluation_needs_no_room_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that comes after it does, and is refused if there is none."""
    eager, ours = twins(Mlp)
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 100)
    call = as_a_user(ours)
    with torch.no_grad():
        for rows in (3, 5):
            assert_same("the result", eager(*vectors(0, rows=rows)), call(*vectors(0, rows=rows)))
    assert types_of(ours) == {nn.Parameter}
    with pytest.raises(zinf_compile.BudgetError, match="the model needs"):
        call(*vectors(0))
    assert types_of(ours) == {nn.Parameter}
    assert_same_models(eager, ours)


def test_a_variant_of_a_graph_needs_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = twins(Mlp)
    call = as_a_user(ours)
    plain_step(call, adamw(ours.parameters()), vectors(0))
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 0)
    loss_of(call(*vectors(1, rows=5))).backward()
    assert types_of(ours) == {nn.Parameter}


def test_a_model_changes_its_type_by_swapping_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch swaps none that has weak references."""
    eager, ours = twins(Mlp)
    call = as_a_user(ours)
    plain_step(eager, adamw(eager.parameters()), vectors(0))
    plain_step(call, adamw(ours.parameters()), vectors(0))
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    for model in (eager, ours):
        model.double().load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    batch = tuple(value.double() for value in vectors(1))
    train_step_on([(eager, adamw(eager.parameters())), (call, adamw(ours.parameters()))], [eager, ours], plain_step, batch, 1)
    assert types_of(ours) == {nn.Parameter}


def test_what_is_noted_stays_so_with_other_memory_and_copies_are_others() -> None:
    """As SAM's second step gives it; and a pickled one is another parameter."""
    model = Mlp()
    plain_step(as_a_user(model), adamw(model.parameters()), vectors(0))
    assert all(map(ordinary.is_ordinary, model.parameters()))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert all(map(ordinary.is_ordinary, model.parameters()))
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    for others in (copy.deepcopy(model).parameters(), torch.load(file)):
        assert not any(map(ordinary.is_ordinary, others))
    zinf_compile.reset()
    assert not any(map(ordinary.is_ordinary, model.parameters()))


def test_nobody_is_warned_where_parameters_get_other_memory_before_their_first_step() -> None:
    model = Mlp()
    loss_of(as_a_user(model)(*vectors(0))).backward()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw(model.parameters()).step()


def test_an_evaluation_uses_parameters_and_makes_none_ordinary() -> None:
    model = nn.ModuleList([Mlp(), Mlp()])
    call = torch.compile(lambda *batch: model[0](*batch) + model[1](*batch), backend="zero_infinity", options=FX)
    plain_step(as_a_user(model[0]), adamw(model[0].parameters()), vectors(0))
    with torch.no_grad():
        call(*vectors(0))
    assert all(map(ordinary.is_used, model.parameters()))
    assert [all(map(ordinary.is_ordinary, part.parameters())) for part in model] == [True, False]
    assert not any(map(ordinary.is_ordinary, model[1].parameters()))
    call(*vectors(0)).backward()
    assert all(map(ordinary.is_ordinary, model.parameters()))


def test_a_second_derivative_is_refused() -> None:
    model = nn.Linear(7, 1)
    x = torch.randn(3, 7, requires_grad=True)
    (grad,) = torch.autograd.grad(as_a_user(model)(x).exp().sum(), x, create_graph=True)
    with pytest.raises(zinf_compile.UnsupportedModelError, match="double backward"):
        grad.square().sum().backward()


def test_numbers_beside_the_partitioned_one() -> None:
    """A loss in chunks, as for a large vocabulary: the same passes, the same bits."""
    losses = []
    for backend, options in (("zero_infinity", FX), (BACKEND, FX)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Linear(7, 23)
        x, y = torch.randn(64, 7), torch.randint(23, (64,))

        def loss(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x), y)

        chunked = {**options, "chunk_loss": True}
        result = torch.compile(loss, backend=backend, options=chunked)(x, y)
        result.backward()
        losses.append((result.detach(), model.weight.detach().clone(), type(model.weight)))
    assert_same("loss", losses[0][0], losses[1][0])
    assert math.isfinite(float(losses[0][0]))
    assert [kind for *_, kind in losses] == [nn.Parameter, ShardedParameter]
