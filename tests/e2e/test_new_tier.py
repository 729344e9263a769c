"""A kind of drive that the product doesn't know: a row, and a class that keeps what lives there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiers import sundry, train_step
from torch import nn
from training import BACKEND

from zinf_compile.errors import OptionError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.storage.stores import STORES, Extents
from zinf_compile.sharded.parameter import ShardedParameter

# A tier: all that it takes ------------------------------------------------------------------------------------------------


class SlowStore:
    """Keeps extents in a dictionary, as bytes."""

    folders: Sequence[str] = ("slow memory",)
    block_bytes = 4096

    def __init__(self, extents: Extents) -> None:
        self.sizes = dict(extents)
        self.kept: dict[Hashable, torch.Tensor] = {}
        self.reads = 0
        self.written: set[str] = set()

    def read(self, key: Hashable, into: torch.Tensor, *, offset: int = 0) -> Pending:
        """See `ShardStore.read`."""
        self.reads += 1
        into.view(torch.uint8).copy_(self.kept[key][offset : offset + into.nbytes])
        return Done()

    def write(self, key: Hashable, source: torch.Tensor, *, offset: int = 0) -> Pending:
        """See `ShardStore.write`."""
        self.written.add(str(key))
        kept = self.kept.setdefault(key, torch.zeros(self.sizes[key], dtype=torch.uint8))
        kept[offset : offset + source.nbytes].copy_(source.view(torch.uint8))
        return Done()

    def close(self) -> None:
        """See `ShardStore.close`."""
        self.kept.clear()


@contextlib.contextmanager
def slow_tier() -> Iterator[list[SlowStore]]:
    """Context in which there is a tier "slow"; gives the stores that are made for it."""
    made: list[SlowStore] = []

    def open_slow(folders: Sequence[str], extents: Extents, *_: object) -> SlowStore:
        made.append(SlowStore(extents))
        return made[-1]

    slow = Tier.add("slow", distance=2, in_memory=False)
    STORES[slow] = open_slow
    try:
        yield made
    finally:
        del STORES[slow]
        Tier.remove(slow)


# --------------------------------------------------------------------------------------------------------------------------


def train(**options: object) -> tuple[list[list[float]], dict[str, torch.Tensor], nn.Module]:
    torch._dynamo.reset()
    model = sundry()
    model.compile(backend=BACKEND, options={"compute": "fx", "compute_shape": {"piece_numel": 64}, **options})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = [train_step(model, optimizer, step) for step in range(3)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, model


@pytest.mark.parametrize("update", [None, "device"])
@pytest.mark.parametrize("own_memory", [False, True], ids=["host", "device"])
def test_training_on_a_new_tier_gives_the_bits_of_the_device(own_memory: bool, update: str | None) -> None:
    with simulating(SimulatedDevice()) if own_memory else contextlib.nullcontext():
        losses, values, _ = train(update="device")
        with slow_tier() as made:
            there = {"params": "slow", "grads": "slow", "optimizer": "slow"}
            found, after, model = train(**there, **({"update": update} if update else {}))
            units = [p._zinf_unit for p in model.parameters() if isinstance(p, ShardedParameter)]
            tiers = {unit.backing.tier for unit in units if unit.backing is not None}
            keys = set[str]().union(*(store.written for store in made))
            reads = sum(store.reads for store in made)
    assert found == losses
    assert after.keys() == values.keys()
    assert all(torch.equal(after[name], values[name]) for name in values)
    assert tiers == {"slow"}
    kinds = ("parameter ", "gradient of ", "exp_avg of ", "exp_avg_sq of ")
    assert all(any(key.startswith(kind) for key in keys) for kind in kinds), keys
    assert reads > 0


@pytest.mark.parametrize("option", ["params", "grads", "optimizer"])
def test_each_kind_of_state_may_live_there_alone(option: str) -> None:
    losses, values, _ = train()
    with slow_tier() as made:
        found, after, _ = train(**{option: "slow"})
        assert any(store.written for store in made)
    assert found == losses
    assert all(torch.equal(after[name], values[name]) for name in values)


def test_a_tier_takes_few_lines() -> None:
    marks = [
        number for number, line in enumerate(Path(__file__).read_text().splitlines()) if line.startswith("# ") and "-----" in line
    ]
    assert [second - first < 60 for first, second in itertools.pairwise(marks)] == [True]


def test_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match=r"option params='slow' is not known; accepted: 'auto', 'device', 'host', 'nvme'"):
        train(params="slow")
