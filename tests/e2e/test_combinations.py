"""Options that make no sense on this machine or for this model: a warning that says so, and numbers as without them."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, TiedWords, loss_of, tokens, vectors
from tiers import Meter, compiled, context_of, options_for, sundry, train_step
from training import adamw, assert_same

import zinf_compile
from zinf_compile.config import Config
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.system import host_limits
from zinf_compile.sharded.caps import find_caps

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "_told", set())


@contextlib.contextmanager
def warned(*patterns: str) -> Iterator[None]:
    """Expect these warnings, one each, in this order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = [str(each.message) for each in caught]
    assert len(told) == len(patterns), told
    for pattern, message in zip(patterns, told, strict=True):
        assert re.search(pattern, message), message


DEVICE = r"option device_memory='900TiB' lets each rank hold 989,560,464,998,400 bytes, and the machine's memory.* is [\d,]+:"
HOST = r"option host_memory='800TiB' lets each rank hold 439,804,651,110,400 bytes, and .* shared by 2 ranks is [\d,]+:"


def test_caps_beyond_the_machine_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For graphs compiled one after the other, too; the model trains."""
    monkeypatch.setattr(host_limits, "find_limits", dict)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = compiled(Mlp(), {"device_memory": "900TiB", "host_memory": "800TiB"})
    with warned(DEVICE, HOST):
        model(*vectors(0)).backward()
    with warned():
        torch.compiler.reset()
        model(*vectors(1)).backward()


@pytest.mark.parametrize("way", ["partition", "partitioned"])
def test_where_a_model_is_partitioned_ahead_of_time(way: str) -> None:
    with warned(DEVICE.replace("the machine's memory", "")):
        if way == "partition":
            with torch.device("meta"):
                model = Mlp()
            zinf_compile.partition(model, device_memory="900TiB")
        else:
            with zinf_compile.partitioned(device_memory="900TiB"):
                Mlp()


def test_a_promise_is_measured_against_what_limits_most(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(host_limits, "find_limits", lambda: {"/sys/fs/cgroup/job/memory.max": "3000", "/job/cpu.max": "1 1"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    config = Config(device_memory=1001, host_memory=3000)
    with warned("device_memory=1001 lets each rank hold 1,001 bytes, and the limit of this process's control group.* is 1,000:"):
        host_limits.warn_of_caps(config, cpu)
    monkeypatch.setattr(
        host_limits.resource, "getrlimit", lambda limit: (900 if limit == host_limits.resource.RLIMIT_DATA else -1, -1)
    )
    with warned("device_memory.* and RLIMIT_DATA is 900:", "host_memory=3000 lets each rank hold 1,000 bytes, and RLIMIT_DATA"):
        host_limits.warn_of_caps(config, cpu)
    with warned():
        host_limits.warn_of_caps(Config(device_memory=900, host_memory=2700), cpu)
        host_limits.warn_of_caps(Config(), cpu)


def test_host_memory_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = compiled(TiedWords(), {})
    loss_of(model(*tokens(0)))
    context = context_of(model)
    for ranks, share in ((1, 1000), (4, 250), (3, 333)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        caps = find_caps(Config(host_memory=1000), context, held=0)
        assert (caps.host, caps.device) == (share, share)
        assert caps.host_source == f"option host_memory, for {ranks} ranks of a node"
        caps = find_caps(Config(host_memory=1000, device_memory=999), context, held=0)
        assert (caps.host, caps.device) == (share, 999)


def test_the_smallest_host_memory_named_is_of_all_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def call(host_memory: int) -> torch.Tensor:
        torch.compiler.reset()
        options = options_for(("host", "host", "nvme"), tmp_path, host_memory=host_memory, device_memory="64MiB", bucket=256)
        loss: torch.Tensor = compiled(Mlp(), options)(*vectors(0))
        return loss

    named = []
    for ranks in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with simulating(SimulatedDevice()), pytest.raises(BudgetError, match=f"for {ranks} ranks of a node") as raised:
            call(ranks)
        found = re.search(r"the smallest host_memory that works is ([\d,]+)", str(raised.value))
        assert found, str(raised.value)
        named.append(int(found[1].replace(",", "")))
        with simulating(SimulatedDevice()):
            call(named[-1])
    assert named[1] == 4 * named[0]


def test_a_master_copy_of_nothing_is_told_and_does_nothing() -> None:
    losses = []
    told = [[], [r"master=\"float32\" does nothing: no parameter is bf16 or fp16; .*, is torch.float32.*model.bfloat16\(\)"]]
    for options, expected in zip(({}, {"master": "float32"}), told, strict=True):
        model = compiled(sundry(), options)
        optimizer = adamw(model.parameters())
        with warned(*expected):
            losses.append([train_step(model, optimizer, step) for step in range(3)])
        assert all("master" not in state for state in optimizer.state_dict()["state"].values())
    assert losses[0] == losses[1]


def test_a_master_copy_of_some_is_not_told() -> None:
    """Norms in fp32 with an optimizer of their own, say."""
    model = TiedWords()
    model.block.bfloat16()
    whole = compiled(MixedCall(model), {"master": "float32"})
    optimizers = [adamw(model.block.parameters()), adamw([p for p in model.parameters() if p.dtype == torch.float32])]
    with warned():
        for number in range(2):
            loss_of(whole(*tokens(number))).backward()
            for optimizer in optimizers:
                optimizer.step()


class MixedCall(torch.nn.Module):
    """Runs a model under autocast."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*batch)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_where_the_device_is_host_memory_it_is_the_same_who_updates(tier: str, tmp_path: Path) -> None:
    """No numbers, no bytes, no warning."""
    found = []
    for update in (None, "host", "device"):
        torch.compiler.reset()
        model = compiled(sundry(), options_for((tier,) * 3, tmp_path, update=update))
        optimizer = adamw(model.parameters())
        with warned():
            losses = [train_step(model, optimizer, 0)]
            meter = Meter(None)
            meter.read(model)
            losses += [train_step(model, optimizer, step) for step in (1, 2)]
        found.append((losses, meter.read(model)))
    assert found[0] == found[1] == found[2]


def test_states_that_live_on_the_device_may_be_updated_by_the_host(tmp_path: Path) -> None:
    """They cross both ways at each step, as is asked for; the numbers are the same."""
    found: dict[Any, Any] = {}
    for states, update in itertools.product(("device", "host"), repeat=2):
        torch.compiler.reset()
        with simulating(SimulatedDevice()) as device:
            model = compiled(sundry(), options_for(("device", "device", states), tmp_path, update=update))
            optimizer = adamw(model.parameters())
            losses = [train_step(model, optimizer, step) for step in range(2)]
            meter = Meter(device)
            meter.read(model)
            losses.append(train_step(model, optimizer, 2))
            found[states, update] = losses, meter.read(model)
    trained = sum(p.numel() * 4 for p in sundry().parameters() if p.requires_grad and p.dim())
    losses, moved = found["device", "host"]
    assert (moved.to_device, moved.to_host) == (3 * trained, 4 * trained), "values and two states both ways, gradients one"
    for each, _ in found.values():
        assert_same("losses", torch.tensor(losses), torch.tensor(each))
