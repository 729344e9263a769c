"""Homes that follow from the caps: as near as there is room, the same bits, never more memory than allowed."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from named_cap import named_cap
from torch import nn
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.errors import BudgetError, OptionError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

NEAR, FAR = ("device",) * 3, ("nvme",) * 3


class Layer(nn.Module):
    """A module of one's own, which can be compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Six equal layers, a number, and one layer that isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(options: dict[str, Any], *, ahead: bool = False, blocks: bool = False) -> tuple[list[float], Counter[Any], nn.Module]:
    """Take two steps of two batches with clipping; return losses, how many parameters have which homes, and the model."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    options = {"bucket": 20_000, "compute_shape": {"piece_numel": 1024}, **options}
    with zinf_compile.partitioned(**{**options, "compute": "fx"}) if ahead else contextlib.nullcontext():
        model = Stack()
    for part in model.layers if blocks else [model]:
        part.compile(backend=BACKEND, options=options)
    optimizer = adamw(model.parameters())
    losses = []
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.ones(2, 64))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()
    units = [p._zinf_unit for p in model.parameters() if isinstance(p, ShardedParameter) and p.dim()]
    placements = [unit.placement for unit in units]
    return losses, Counter((str(p.params), str(p.grads), str(p.optimizer)) for p in placements), model


def peaks(model: nn.Module) -> dict[str, int]:
    return {side: account["peak"]["all"] for side, account in zinf_compile.stats(model)["memory"].items()}


def least(options: dict[str, Any]) -> int:
    """Return the smallest device_memory that a refusal names."""
    with pytest.raises(BudgetError) as refused:
        train({**options, "device_memory": 4096})
    found = re.search(r"the smallest(?: device_memory)? that works is ([\d,]+)", str(refused.value))
    assert found is not None, str(refused.value)
    return int(found[1].replace(",", ""))


@contextlib.contextmanager
def on(apart: bool) -> Iterator[None]:
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        yield


def test_small_parameters_stay_near_before_large_ones(tmp_path: Path) -> None:
    """A little above the smallest cap all of the biases is on the device and of no weight is; farther above of some weights.

    The losses are those without a cap.
    """

    def run(**options: Any) -> tuple[list[float], dict[int, set[tuple[str, str, str]]]]:
        """Return losses, and the homes by how many dimensions parameters have."""
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        call = torch.compile(model, backend=BACKEND, options={"compute": "fx", **options})
        optimizer, losses = adamw(model.parameters()), []
        for _ in range(3):
            loss = call(torch.ones(2, 512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found: dict[int, set[tuple[str, str, str]]] = {1: set(), 2: set()}
        for parameter in model.parameters():
            own = parameter._zinf_unit.placement
            found[parameter.dim()].add((str(own.params), str(own.grads), str(own.optimizer)))
        return losses, found

    with on(True):
        expected, _ = run()
        with pytest.raises(BudgetError) as refused:
            run(nvme=str(tmp_path), device_memory=4096)
        named = re.search(r"the smallest(?: device_memory)? that works is ([\d,]+)", str(refused.value))
        assert named is not None
        smallest = int(named[1].replace(",", ""))
        losses, near = run(nvme=str(tmp_path), device_memory=smallest + (2 << 20))
        assert near[1] == {NEAR}
        assert NEAR not in near[2]
        assert losses == expected
        losses, middle = run(nvme=str(tmp_path), device_memory=smallest + (9 << 20))
        assert middle[1] == {NEAR}
        assert len(middle[2]) > 1
        assert losses == expected


@pytest.mark.parametrize("apart", [False, True])
def test_the_smallest_cap_and_larger_ones(apart: bool, tmp_path: Path) -> None:
    with on(apart):
        expected, _, model = train({})
        everything = peaks(model)["device"]
        options = {"nvme": str(tmp_path)}
        smallest = least(options)
        with pytest.raises(BudgetError, match=f"that works is {smallest:,}"):
            train({**options, "device_memory": smallest - 1})
        mixed = 0
        for cap in (smallest, (smallest + everything) // 2, 2 * everything):
            losses, homes, model = train({**options, "device_memory": cap})
            assert losses == expected
            assert peaks(model)["device"] <= cap
            mixed += len(homes) > 1
        assert mixed, "a cap in between has room for some"
        assert homes == Counter({NEAR: 14})


def test_a_word_forces_its_kind_and_a_drive_alone_changes_nothing(tmp_path: Path) -> None:
    expected, homes, _ = train({"nvme": str(tmp_path)})
    assert homes == Counter({NEAR: 14}), "all of it fits into this machine"
    losses, homes, _ = train({"nvme": str(tmp_path), "optimizer": "nvme"})
    assert homes == Counter({("device", "device", "nvme"): 14})
    assert losses == expected
    with pytest.raises(OptionError, match="no tier uses it"):
        train({"nvme": str(tmp_path), **dict.fromkeys(("params", "grads", "optimizer"), "device")})


@pytest.mark.parametrize(("ahead", "blocks"), [(True, False), (False, True), more(True, True)])
def test_caps_hold_for_graphs_together(ahead: bool, blocks: bool, tmp_path: Path) -> None:
    """Models partitioned before any graph is known, and blocks compiled by themselves, which share one graph."""
    expected, _, _ = train({}, blocks=blocks)
    for cap in (500_000, 800_000):
        losses, homes, model = train({"nvme": str(tmp_path), "device_memory": cap}, ahead=ahead, blocks=blocks)
        assert losses == expected
        assert peaks(model)["device"] <= cap
        assert sum(count for home, count in homes.items() if home != FAR), f"some live near: {homes}"


class Reads(nn.Module):
    """Reads the parameters of nine layers, and uses those of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.used(x)


def test_what_no_compute_uses_is_near_where_all_else_is(tmp_path: Path) -> None:
    for cap, homes in ((None, NEAR), ("64MiB", NEAR), ("24MiB", FAR)):
        torch.compiler.reset()
        zinf_compile.reset()
        model = Reads()
        options: dict[str, Any] = {"nvme": str(tmp_path), "activations": "keep", "compute_shape": {"piece_numel": 65536}}
        options |= {} if cap is None else {"device_memory": cap}
        model.compile(backend=BACKEND, options=options)
        model(torch.ones(2, 512)).sum().backward()
        placement = model.unused.weight._zinf_unit.placement
        assert tuple(map(str, (placement.params, placement.grads, placement.optimizer))) == homes
        assert model.unused.weight.grad is None


def test_a_small_model_trains_within_less_than_its_states_take(tmp_path: Path) -> None:
    """By default pieces are small beside the model: with those of a large one, a step on a drive takes what all states do."""

    def trained(**options: Any) -> tuple[list[float], set[Any]]:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        call: Any = torch.compile(model, backend=BACKEND, options={"bucket": "1MiB", **options})
        optimizer = adamw(model.parameters())
        losses = []
        for _ in range(2):
            loss = call(torch.ones(2, 512)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        zinf_compile.synchronize()
        return losses, {p._zinf_unit.placement.optimizer for p in model.parameters() if isinstance(p, ShardedParameter)}

    states = 2 * 4 * 6 * 512 * 513
    losses, homes = trained(device_memory=states - 1, nvme=str(tmp_path))
    assert "nvme" in homes
    assert losses == trained()[0]


class Evaluated:
    """Training within a cap, after an evaluation or without one."""

    def __init__(self, build: Callable[[], nn.Module], x: torch.Tensor, **options: Any) -> None:
        self._build, self._x, self._options = build, x, options
        with pytest.raises(BudgetError) as refused:
            self.losses(1)
        self.least = named_cap(refused.value)

    def losses(self, cap: int, *, evaluated: bool = False) -> list[float]:
        """Return those of two steps."""
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model = self._build()
        compiled = torch.compile(model, backend=BACKEND, options={**self._options, "device_memory": cap})
        optimizer = adamw(model.parameters())
        if evaluated:
            with torch.no_grad():
                compiled(self._x)
        return [plain_step(lambda x: compiled(x).square().mean(), optimizer, (self._x,)).item() for _ in range(2)]


def test_an_evaluation_before_the_first_step_leaves_room_for_training(tmp_path: Path) -> None:
    """It decides the homes, with the tiles that are given, as the training graph would have."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)))

    training = Evaluated(build, torch.linspace(-1, 1, 256 * 128).view(256, 128), nvme=str(tmp_path), tile="1MiB")
    expected = training.losses(training.least)
    for beside in (0, 100_000, 1_000_000, 2_500_000):
        assert training.losses(training.least + beside, evaluated=True) == expected


def test_an_evaluation_before_the_first_step_cuts_parameters_for_training(tmp_path: Path) -> None:
    """All caps work with which training works that comes first: it has the tiles that a backward needs."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 4096), nn.Linear(4096, 128))

    training = Evaluated(build, torch.linspace(-1, 1, 16 * 128).view(16, 128), nvme=str(tmp_path))
    expected = training.losses(training.least)
    for parts in (8, 9, 10, 12, 16):
        found = training.losses(training.least * parts // 8, evaluated=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
