"""The record of an optimizer: its states, and for how long it is kept."""

from __future__ import annotations

import copy
import gc
import weakref

import torch

from zinf_compile.optim.record import State, all_records, record_of


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_a_step_that_ends_in_its_middle_says_where() -> None:
    record = record_of(optimizer := sgd())
    assert record is record_of(optimizer)
    assert (record.state, record.incomplete) == (State.WHOLE, None)
    record.mark_incomplete("SGD", 3)
    assert record.state is State.UPDATING
    assert "SGD ended in the middle, at chunk 3" in (record.incomplete or "")
    record.mark_deferred()
    record.mark_incomplete("SGD", 4)
    assert record.state is State.DEFERRED, "until it is over"
    record.mark_ended()
    assert record.state is State.INCOMPLETE
    assert "at chunk 4" in (record.incomplete or "")
    record.mark_ended("what the drive has lost")
    assert record.incomplete == "what the drive has lost"
    record.mark_whole()
    assert (record.state, record.incomplete) == (State.WHOLE, None)


def test_a_record_goes_with_its_optimizer_and_is_not_copied() -> None:
    optimizer = sgd()
    record_of(optimizer).warned.add("once")
    assert not record_of(copy.deepcopy(optimizer)).warned
    gone = weakref.ref(optimizer)
    assert any(found is optimizer for found, _ in all_records())
    del optimizer
    gc.collect()
    assert gone() is None
    assert all(record.warned != {"once"} for _, record in all_records())
