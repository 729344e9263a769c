"""Values of parameters off the device that are larger than what the caps leave: saved piece by piece, or refused by name."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offloaded_twins import NVME, saved, trained, value_at
from rank_save_check import save_check
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiers import compiled, context_of, options_for
from torch import nn

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.units.fetch import shortage

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@contextlib.contextmanager
def room_for(model: nn.Module, count: int) -> Iterator[None]:
    """Context in which the cap leaves room for `count` bytes more than is held; nothing that is brought exceeds it."""
    context = context_of(model)
    gc.collect()
    staging = max(0, context.memory.staging.cap_bytes - context.memory.staging.bytes)
    before, context.memory.reservations.device_cap = (
        context.memory.reservations.device_cap,
        context.memory.ledger.total()[0] + staging + count,
    )
    context.memory.ledger.forget_peaks()
    try:
        yield
        assert context.memory.ledger.total()[1] <= context.memory.reservations.device_cap
    finally:
        context.memory.reservations.device_cap = before


def test_saving_a_model_larger_than_memory_is_bounded(tmp_path: Path) -> None:
    """`torch.save` has one value at a time; pointers, as safetensors wants them all at once, are into a file."""
    with trained(tmp_path) as twins:
        zinf_compile.synchronize()
        largest = twins.eager.embedding.weight.nbytes
        assert sum(p.nbytes for p in twins.eager.parameters()) > 2 * largest
        with room_for(twins.ours, largest):
            held = context_of(twins.ours).memory.ledger.total()[0]
            twins.check(saved(twins.ours.state_dict()))
            assert context_of(twins.ours).memory.ledger.total()[0] == held
            state = twins.ours.state_dict()
            kept = state.pop("head.weight")
            save_file(state, tmp_path / "model.safetensors")
            twins.check({**load_file(tmp_path / "model.safetensors"), "head.weight": kept})
            state["up.weight"].mul_(2)  # goes to where the pointer is, too
            twins.eager.state_dict()["up.weight"].mul_(2)
            twins.check({**state, "up.weight": value_at(state["up.weight"].data_ptr(), state["up.weight"]), "head.weight": kept})
            del state, kept


def test_a_value_that_does_not_fit(tmp_path: Path) -> None:
    with trained(tmp_path) as twins:
        zinf_compile.synchronize()
        value, largest = twins.ours.state_dict()["embedding.weight"], twins.eager.embedding.weight.nbytes
        for read in (lambda: value + 1, value.data_ptr, lambda: torch.save(value, io.BytesIO()), value.zero_):
            with (
                room_for(twins.ours, largest - 1),
                pytest.raises(BudgetError, match=r"embedding.weight takes 828 bytes whole.*smallest device_memory that works is"),
            ):
                read()
        with room_for(twins.ours, largest - 1), pytest.raises(BudgetError) as caught:
            value.sum()
        named = int(re.findall(r"works is ([\d,]+)", str(caught.value))[0].replace(",", ""))
        with room_for(twins.ours, largest):
            assert context_of(twins.ours).memory.reservations.device_cap == named
            assert value.sum() == twins.eager.embedding.weight.sum()


class Wide(nn.Module):
    """A weight of eight megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 1 << 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


def test_no_room_for_a_single_value_is_said_at_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for cap, said in ((None, False), ("3MiB", True)):
        torch.compiler.reset()
        model = compiled(Wide(), options_for(NVME, tmp_path, piece=1 << 14, tile="64KiB", device_memory=cap, bucket="64KiB"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with caplog.at_level(logging.WARNING, "zinf_compile"):
                model(torch.ones(2, 64)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [record.message for record in caplog.records if "state_dict()" in record.message]
        assert len(found) == said, found
        context = context_of(model)
        assert bool(shortage(model.up.weight._zinf_unit, context.memory.ledger)) == said
        if said:
            assert "parameter up.weight takes 8,388,608 bytes whole" in found[0]
            with pytest.raises(BudgetError):
                torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.distributed
def test_several_ranks_are_told_at_the_first_step() -> None:
    (said, error), (others, _) = run_ranks(save_check, 2)
    assert len(said) == 1
    assert "zinf_compile.full_state_dict(model)" in said[0]
    assert others == []
    assert "full_state_dict" in error
