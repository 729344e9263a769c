"""`zinf_compile.reset()` on one process: everything is let go of, and what comes after is as in a new process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resetting import Tied, assert_nothing_more_than, placed, possessions, train

import zinf_compile
from zinf_compile.errors import PartitionedParameterError, UnsupportedModelError
from zinf_compile.optim.record import _records
from zinf_compile.runtime.context import _contexts, all_contexts
from zinf_compile.runtime.storage.extent_store import _LIVE
from zinf_compile.sharded.parameter import unit_of

WORDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    zinf_compile.reset()
    yield
    zinf_compile.reset()


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_training_starts_anew(tier: str, tmp_path: Path) -> None:
    options = placed(tier, str(tmp_path))
    train(options)
    zinf_compile.reset()
    before = possessions()
    model, optimizer, losses = train(options)
    ledgers = {id(ledger): ledger for context in all_contexts() for ledger in (context.memory.ledger, context.memory.host_ledger)}
    arenas = [context.memory.gather_memory for context in all_contexts()]
    assert any(ledger.total()[0] for ledger in ledgers.values())
    if tier == "nvme":
        assert possessions()[1:] > before[1:]
    shards = [
        weakref.ref(unit._shard) for p in model.parameters() if (unit := unit_of(p)) is not None and unit._shard is not None
    ]
    zinf_compile.reset()
    assert_nothing_more_than(before)
    assert not any(shard() for shard in shards)
    assert [ledger.total()[0] for ledger in ledgers.values()] == [0] * len(ledgers)
    assert [arena.held_bytes() for arena in arenas] == [0] * len(arenas)
    registries: list[Any] = [_contexts, _records, [store for store in _LIVE if not store._closed]]
    assert not any(registries)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert train(options)[2] == losses
    del model, optimizer  # whose finalizers find everything gone
    gc.collect()


READS: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "call": lambda model, optimizer: model(WORDS),
    "call without gradients": lambda model, optimizer: torch.no_grad()(model)(WORDS),
    "read": lambda model, optimizer: model.inner.weight + 1,
    "detach": lambda model, optimizer: model.inner.weight.detach().sum(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "full_state_dict": lambda model, optimizer: zinf_compile.full_state_dict(model),
    "load": lambda model, optimizer: zinf_compile.load_full_state_dict(model, Tied().state_dict()),
    "gathered": lambda model, optimizer: zinf_compile.gathered(model).__enter__(),
    "step": lambda model, optimizer: optimizer.step(),
    "optimizer's state_dict": lambda model, optimizer: optimizer.state_dict(),
    "optimizer's load_state_dict": lambda model, optimizer: optimizer.load_state_dict(
        torch.optim.AdamW(Tied().parameters()).state_dict()
    ),
    "states": lambda model, optimizer: zinf_compile.full_optimizer_state_dict(optimizer),
    "stats": lambda model, optimizer: zinf_compile.stats(model),
    "copy": lambda model, optimizer: copy.deepcopy(model),
}


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_model_from_before_is_refused(tier: str, tmp_path: Path) -> None:
    model, optimizer, _ = train(placed(tier, str(tmp_path)), steps=1)
    loss = model(WORDS).sum()
    zinf_compile.reset()
    for name, read in READS.items():
        with pytest.raises(PartitionedParameterError, match=r"partitioned before zinf_compile.reset\(\).*full_state_dict"):
            print(name, read(model, optimizer))
        assert not all_contexts(), f"{name} made one anew"
    with pytest.raises(PartitionedParameterError, match=r"partitioned before zinf_compile.reset\(\)"):
        loss.backward()
    assert (
        repr(model.inner.weight)
        == "ShardedParameter(inner.weight, shape=[7, 7], dtype=torch.float32, gone with zinf_compile.reset())"
    )
    assert zinf_compile.memory(model)["now"]["params"] == 0
    torch.testing.assert_close(train(placed("device", ""), steps=1)[2], train(placed(tier, str(tmp_path)), steps=1)[2])


def test_values_go_over_by_a_state_dict() -> None:
    model, _, _ = train(placed("device", ""), steps=1)
    saved = zinf_compile.full_state_dict(model)
    zinf_compile.reset()
    fresh = Tied()
    fresh.load_state_dict(saved)
    fresh.compile(backend="zero_infinity", options={"compute": "fx"})
    fresh(WORDS)
    assert all(torch.equal(value, saved[name]) for name, value in zinf_compile.full_state_dict(fresh).items())


def test_it_refuses_in_the_middle_of_something_and_changes_nothing() -> None:
    model, _, losses = train(placed("host", ""))
    with zinf_compile.gathered(model), pytest.raises(PartitionedParameterError, match=r"parameter \S+ is gathered: leave"):
        zinf_compile.reset()
    with zinf_compile.partitioned(compute="fx"), pytest.raises(UnsupportedModelError, match="leave the block first"):
        zinf_compile.reset()
    model(WORDS).sum().backward()
    assert train(placed("host", ""))[2] == losses


def test_again_and_with_nothing_made() -> None:
    zinf_compile.reset()
    zinf_compile.reset()
    assert not all_contexts()
