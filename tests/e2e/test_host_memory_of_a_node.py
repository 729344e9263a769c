"""`host_memory` of a node with several ranks, on the CPU: each refusal names the bytes of all of them together, which work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from offloaded_twins import NVME
from tiers import compiled, context_of, options_for

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.memory.rank_memory import Memory
from zinf_compile.runtime.units.companion_memory import check_room

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

RANKS = 3


@pytest.fixture(autouse=True)
def _node_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS))


def named_by(error: object) -> int:
    (found,) = re.findall(r"[Tt]he smallest host_memory that works is ([\d,]+)", str(error))
    return int(found.replace(",", ""))


def follow_refusals(work: Callable[[int], object]) -> list[int]:
    """Call `work` with a `host_memory` of one byte, then with those that its errors name, until one works; return all of them."""
    caps = [0, 1]
    while caps[-1] > caps[-2]:
        torch.compiler.reset()
        try:
            work(caps[-1])
        except BudgetError as error:
            caps.append(named_by(error))
        else:
            return caps[1:]
    raise AssertionError(f"the last of these was refused before: {caps}")


def trained(options: dict[str, Any], **how: Any) -> Mlp:
    """Train, with gradients that accumulate; `how`: of the optimizer."""
    model = compiled(Mlp(), options)
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for step in range(2):
        for _ in range(2):
            model(*vectors(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def test_training() -> None:
    caps = follow_refusals(lambda cap: trained({"host_memory": cap}))
    assert len(caps) == 2, "the first refusal names what works"
    assert caps[1] % RANKS == 0


def test_a_step_with_a_state_that_no_plan_knew() -> None:
    assert len(follow_refusals(lambda cap: trained({"host_memory": cap}, amsgrad=True))) > 2


def test_partition() -> None:
    def partition(cap: int) -> None:
        with torch.device("meta"):
            model = Mlp()
        zinf_compile.partition(model, host_memory=cap)

    assert len(follow_refusals(partition)) == 2


def allow(memory: Memory, count: int) -> None:
    """Let each rank hold so many bytes, as `host_memory` does."""
    memory.reservations.declare(device=None, host=count)
    memory.reservations.device_cap = count


def test_a_whole_value_of_a_parameter_on_a_drive(tmp_path: Path) -> None:
    model = trained(options_for(NVME, tmp_path, host_memory="3MiB"))
    zinf_compile.synchronize()
    value, memory = model.state_dict()["first.weight"], context_of(model).memory
    allow(memory, memory.ledger.total()[0] + model.first.weight.nbytes - 1)
    with pytest.raises(BudgetError, match=r"first.weight takes [\d,]+ bytes whole") as refused:
        value.sum()
    allow(memory, named_by(refused.value) // RANKS)
    value.sum()


def test_a_tensor_like_a_parameter() -> None:
    model = trained({"host_memory": "3MiB"})
    unit, memory = model.first.weight._zinf_unit, context_of(model).memory
    allow(memory, memory.ledger.total()[0] + 4 * unit.shard_numel - 1)
    with pytest.raises(BudgetError, match=r"a tensor partitioned like first.weight takes") as refused:
        check_room(unit, torch.float32)
    allow(memory, named_by(refused.value) // RANKS)
    check_room(unit, torch.float32)
