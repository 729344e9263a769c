"""Caps on memory: what doesn't fit is an error that says what would, and what fits stays within at every step."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from models import TiedWords, loss_of, tokens
from torch import nn
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.memory.reservations import Reservation
from zinf_compile.runtime.system import host_limits
from zinf_compile.sharded.budget_checks import lack_of_second_gradients
from zinf_compile.sharded.parameter import ShardedParameter, unit_behind

SMALL_PIECES = {"compute_shape": {"piece_numel": 128}}

LATER = 0
"""Refusals after the first."""

ALL_AWAY = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


STEPS = 3
MICRO_BATCHES = 2


class Layers(nn.Module):
    """Parameters of several pages, none of which is full."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(97, 97) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def losses_of_step(model: nn.Module, number: int) -> Iterator[torch.Tensor]:
    """Compute the losses of one step's micro-batches."""
    for micro in range(MICRO_BATCHES):
        batch = MICRO_BATCHES * number + micro
        yield loss_of(model(*tokens(batch))) if isinstance(model, TiedWords) else model(torch.randn(4, 97))


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def eager_losses(kind: type[nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model = kind()
    optimizer = adamw(model.parameters())
    losses = []
    for number in range(STEPS):
        for loss in losses_of_step(model, number):
            loss.backward()
            losses.append(loss.item())
        finish_step(model, optimizer)
    return losses


def train(options: dict[str, Any], *, kind: type[nn.Module] = TiedWords) -> None:
    """Accumulate, clip and update, to eager's losses; what is held stays within the caps at every moment."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    model = kind()
    model.compile(backend=BACKEND, options={"compute": "fx", "bucket": 256, **SMALL_PIECES, **options})
    optimizer = adamw(model.parameters())
    losses = []
    for number in range(STEPS):
        for micro, loss in enumerate(losses_of_step(model, number)):
            losses.append(loss.item())
            parameter = next(model.parameters())
            assert isinstance(parameter, ShardedParameter)
            context = parameter._zinf_unit.context
            if not (number or micro):  # of other models, over the same ranks
                context.memory.ledger.forget_peaks()
                context.memory.host_ledger.forget_peaks()
            loss.backward()
        finish_step(model, optimizer)
        zinf_compile.synchronize()
        reservations = context.memory.reservations
        assert reservations.device_cap is not None
        assert reservations.host_cap is not None
        assert context.memory.ledger.total()[1] <= reservations.device_cap
        assert context.memory.host_ledger.total()[1] <= reservations.host_cap
    assert losses == eager_losses(kind)


def smallest_after(options: dict[str, Any], least: int, option: str, *, kind: type[nn.Module] = TiedWords) -> int:
    """Train with this cap; where what is known later, states and second gradients, doesn't fit, return what does."""
    refusals: list[str] = []
    while True:
        try:
            train({**options, option: least}, kind=kind)
        except BudgetError as error:
            refusals.append(str(error))
        else:
            return least
        found = re.search(rf"^(?:AdamW|a second backward) .* [Tt]he smallest {option} that works is ([\d,]+)", refusals[-1])
        assert found, refusals
        assert len(refusals) <= LATER, refusals
        least = int(found[1].replace(",", ""))


def smallest(options: dict[str, Any], option: str, *, kind: type[nn.Module] = TiedWords) -> int:
    """Return what the error for a cap of one byte calls the smallest that works."""
    with pytest.raises(BudgetError) as caught:
        train({**options, option: 1}, kind=kind)
    found = re.search(r"the smallest(?: \w+)? that works is ([\d,]+)", str(caught.value), re.IGNORECASE)
    assert found, str(caught.value)
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "away",
    [more({}), more({"params": "nvme"}), more({"grads": "nvme"}), more({"optimizer": "nvme"}), ALL_AWAY],
    ids=lambda away: "+".join(away) or "none",
)
def test_the_smallest_cap_that_is_named_works_and_one_byte_less_does_not(away: dict[str, Any], tmp_path: Path) -> None:
    options = {**away, **({"nvme": tmp_path} if away else {})}
    least = smallest_after(options, smallest(options, "device_memory"), "device_memory")
    with pytest.raises(BudgetError):
        train({**options, "device_memory": least - 1})


@pytest.mark.parametrize(
    ("option", "apart", "bucket"),
    [
        ("host_memory", True, 256),
        more("device_memory", False, 256),
        more("host_memory", False, 256),
        more("device_memory", True, 256),
        *(more(option, apart, 40 << 10) for option in ("device_memory", "host_memory") for apart in (False, True)),
    ],
)
def test_with_all_on_drives_the_smallest_cap_is_known_at_once_and_holds(
    option: str, apart: bool, bucket: int, tmp_path: Path
) -> None:
    """Values, gradients and blocks for drives pass through it, read ahead or not: nothing that counts is left out."""
    options = {**ALL_AWAY, "nvme": tmp_path, "bucket": bucket, "compute_shape": {"piece_numel": 4096}}
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        least = smallest(options, option, kind=Layers)
        train({**options, option: least}, kind=Layers)
        train({**options, option: least + 200_000}, kind=Layers)
        with pytest.raises(BudgetError):
            train({**options, option: least - 1}, kind=Layers)


def test_the_error_says_what_is_needed_for_what(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"are gathered at once \(with .*\).*option device_memory\); the smallest that works is"
    ):
        train({**ALL_AWAY, "nvme": tmp_path, "device_memory": "1KiB"})
    with pytest.raises(BudgetError, match=r"option host_memory, for 1 ranks of a node"):
        train({**ALL_AWAY, "nvme": tmp_path, "host_memory": "1KiB"})


def test_nothing_happened_to_a_model_that_does_not_fit() -> None:
    """Nor to the caps of others on the same ranks."""
    zinf_compile.reset()
    other = Layers()
    other.compile(backend=BACKEND, options={"compute": "fx"})
    other(torch.ones(4, 97)).backward()
    context = unit_behind(other.layers[0].weight).context
    caps = context.memory.reservations.caps
    model = TiedWords()
    model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": 10})
    with pytest.raises(BudgetError):
        model(*tokens(0))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert context.memory.reservations.caps == caps


def test_states_that_do_not_fit_are_an_error_before_the_first_update() -> None:
    model = TiedWords()
    numel = sum(p.numel() for p in model.parameters())
    whole = smallest({}, "device_memory")  # with two states for each parameter
    model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": whole - 8 * numel})
    optimizer = adamw(model.parameters())
    loss_of(model(*tokens(0))).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError, match=r"AdamW needs .* nothing was updated.*optimizer='nvme' keeps states on a drive"):
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("option", ["device_memory", "host_memory"])
@pytest.mark.parametrize(
    ("params", "optimizer"),
    [
        ("device", "nvme"),
        more("nvme", "host"),
        *(more(params, optimizer) for params in ("device", "host", "nvme") for optimizer in ("device", "host", "nvme")),
    ],
)
def test_a_device_with_memory_of_its_own_has_a_cap_beside_the_host(
    params: str, optimizer: str, option: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"params": params, "grads": params, "optimizer": optimizer}
    if "nvme" in (params, optimizer):
        options["nvme"] = tmp_path
    with simulating(SimulatedDevice()):
        if option == "host_memory":
            options["device_memory"] = "8MiB"  # where the device is a CPU, its cap would be the host's
            if params == optimizer == "device":  # nothing is there
                train({**options, option: 1})
                return
        smallest_after(options, smallest(options, option), option)


def test_what_a_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_limits.usable_host_bytes() == int(250 * 0.9)
    monkeypatch.setattr(host_limits, "_used_bytes", lambda: (1000, 800))
    monkeypatch.setattr(
        host_limits.resource, "getrlimit", lambda limit: (900 if limit == host_limits.resource.RLIMIT_DATA else -1, -1)
    )
    assert host_limits.usable_host_bytes() == int(100 * 0.9)


def test_memory_is_reported() -> None:
    model = TiedWords()
    model.compile(backend=BACKEND, options={"compute": "fx"})
    model(*tokens(0))
    assert zinf_compile.memory(model)["now"]["params"] >= 4 * sum(p.numel() for p in model.parameters())


def test_what_a_graph_claims_goes_with_it(tmp_path: Path) -> None:
    """A model without a cap before one with a small one, and still alive while that is partitioned."""
    options = {**ALL_AWAY, **SMALL_PIECES, "nvme": tmp_path}
    first, second = TiedWords(), TiedWords()
    first.compile(backend=BACKEND, options=options)
    plain_step(first, adamw(first.parameters()), tokens(0))
    torch.compiler.reset()
    second.compile(backend=BACKEND, options={**options, "device_memory": "1MiB"})
    loss_of(second(*tokens(0))).backward()
    del first
    adamw(second.parameters()).step()


def test_a_second_backward_names_more_than_the_cap_in_force() -> None:
    """A graph's plan runs further ahead than another of its caps would let it, as one that follows an earlier graph's does."""
    model = Layers()
    model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": "4MiB"})
    optimizer = adamw(model.parameters())
    for loss in losses_of_step(model, 0):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    parameter = next(model.parameters())
    assert isinstance(parameter, ShardedParameter)
    context = parameter._zinf_unit.context
    passing = 4 << 20
    ahead = Reservation(passing=passing, left=0, reduced=0, chunk_buffers=1, backward=True)
    context.memory.reservations.add(ahead)
    (lack,) = lack_of_second_gradients(context, [parameter._zinf_unit]).values()
    assert lack.short
    assert lack.works >= lack.needed
