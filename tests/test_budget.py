"""Caps on memory: what doesn't fit is an error that says what would, and what fits stays within at every step."""

from __future__ import annotations

import functools
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, loss_of, tokens
from torch import nn
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile import limits
from zinf_compile.errors import BudgetError
from zinf_compile.parameter import ShardedParameter
from zinf_compile.runtime import chunks
from zinf_compile.runtime.bridge import FakeDevice, played_by
from zinf_compile.runtime.context import Context


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_NUMEL", 128)


ALL_AWAY = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


@functools.cache
def eager_losses(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = TiedWords()
    optimizer = adamw(model.parameters())
    losses = []
    for number in range(steps):
        loss = loss_of(model(*tokens(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(options: dict[str, Any], *, steps: int = 3) -> Context:
    """Train a small model in pieces of 128 elements, to eager's losses; return what its ranks share."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    model = TiedWords()
    model.compile(backend=BACKEND, options={"compute": "fx", "bucket": 256, **options})
    optimizer = adamw(model.parameters())
    losses = []
    for number in range(steps):
        loss = loss_of(model(*tokens(number)))
        losses.append(loss.item())
        parameter = next(model.parameters())
        assert isinstance(parameter, ShardedParameter)
        context = parameter._zinf_unit.context
        if not number:  # of other models, over the same ranks
            context.ledger.forget_peaks()
            context.host_ledger.forget_peaks()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        claims = context.claims
        assert claims.device_cap is not None
        assert claims.host_cap is not None
        assert context.ledger.total()[1] <= claims.device_cap
        assert context.host_ledger.total()[1] <= claims.host_cap
    assert losses == eager_losses(steps)
    return context


def smallest_after(options: dict[str, Any], least: int) -> int:
    """Train with this cap; where the optimizer's states, known at the first step only, don't fit, return what does."""
    refusals = []
    try:
        train({**options, "device_memory": least})
    except BudgetError as error:
        refusals.append(str(error))
    if refusals:
        found = re.search(r"AdamW needs .* The smallest device_memory that works is ([\d,]+)", refusals[0])
        assert found, refusals
        least = int(found[1].replace(",", ""))
        train({**options, "device_memory": least})
    return least


def smallest(options: dict[str, Any], option: str) -> int:
    """Return what the error for a cap of one byte calls the smallest that works."""
    with pytest.raises(BudgetError) as caught:
        train({**options, option: 1})
    found = re.search(r"the smallest(?: \w+)? that works is ([\d,]+)", str(caught.value), re.IGNORECASE)
    assert found, str(caught.value)
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "away",
    [{}, {"params": "nvme"}, {"grads": "nvme"}, {"optimizer": "nvme"}, ALL_AWAY],
    ids=lambda away: "+".join(away) or "none",
)
def test_the_smallest_cap_that_is_named_works_and_one_byte_less_does_not(away: dict[str, Any], tmp_path: Path) -> None:
    options = {**away, **({"nvme": tmp_path} if away else {})}
    least = smallest_after(options, smallest(options, "device_memory"))
    with pytest.raises(BudgetError):
        train({**options, "device_memory": least - 1})


def test_the_error_says_what_is_needed_for_what(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"are gathered at once \(with .*\).*option device_memory\); the smallest that works is"
    ):
        train({**ALL_AWAY, "nvme": tmp_path, "device_memory": "1KiB"})
    with pytest.raises(BudgetError, match=r"option host_memory, for 1 ranks of a node"):
        train({**ALL_AWAY, "nvme": tmp_path, "host_memory": "1KiB"})


def test_nothing_happened_to_a_model_that_does_not_fit() -> None:
    model = TiedWords()
    model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": 10})
    with pytest.raises(BudgetError):
        model(*tokens(0))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_states_that_do_not_fit_are_an_error_before_the_first_update() -> None:
    model = TiedWords()
    numel = sum(p.numel() for p in model.parameters())
    model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": 4 * numel * 2 + 4 * numel})
    optimizer = adamw(model.parameters())
    loss_of(model(*tokens(0))).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError, match=r"AdamW needs .* nothing was updated.*optimizer='nvme' keeps states on a drive"):
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("params", ["device", "host", "nvme"])
@pytest.mark.parametrize("optimizer", ["device", "host", "nvme"])
def test_a_device_with_memory_of_its_own_has_a_cap_beside_the_host(params: str, optimizer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"params": params, "grads": params, "optimizer": optimizer}
    if "nvme" in (params, optimizer):
        options["nvme"] = tmp_path
    with played_by(FakeDevice()) as device:
        least = smallest_after(options, smallest(options, "device_memory"))
        assert device.memory.held_bytes() <= max(least, 4096 * 64), "pages of the smallest buffers"


def test_what_a_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert limits.usable_host_bytes() == int(250 * 0.9)
    monkeypatch.setattr(limits, "_used_bytes", lambda: (1000, 800))
    monkeypatch.setattr(limits.resource, "getrlimit", lambda limit: (900 if limit == limits.resource.RLIMIT_DATA else -1, -1))
    assert limits.usable_host_bytes() == int(100 * 0.9)


def test_memory_is_reported() -> None:
    model = TiedWords()
    model.compile(backend=BACKEND, options={"compute": "fx"})
    model(*tokens(0))
    assert zinf_compile.memory(model)["now"]["params"] >= 4 * sum(p.numel() for p in model.parameters())


def test_what_a_graph_claims_goes_with_it(tmp_path: Path) -> None:
    """A model without a cap before one with a small one, and still alive while that is partitioned."""
    options = {**ALL_AWAY, "nvme": tmp_path}
    first, second = TiedWords(), TiedWords()
    first.compile(backend=BACKEND, options=options)
    plain_step(first, adamw(first.parameters()), tokens(0))
    torch.compiler.reset()
    second.compile(backend=BACKEND, options={**options, "device_memory": "1MiB"})
    loss_of(second(*tokens(0))).backward()
    del first
    adamw(second.parameters()).step()
