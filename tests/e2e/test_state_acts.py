"""What a script does to `optimizer.state` between steps: reads, changes and replacements have eager's effect, on each tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from state_acts import EVERY, delete_momentum, forget_momentum, restart_momentum, same
from state_pairs import ALL_ON_NVME, Act, Pair, sgd
from tiers import Placement
from torch.optim import Optimizer
from training import adamw

from zinf_compile.optim.state_entry import StateEntry
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

PLACEMENTS: list[tuple[Placement, bool]] = [
    (ALL_ON_NVME, False),
    (("device", "device", "nvme"), False),
    (("device", "device", "device"), False),
    (("nvme", "nvme", "device"), False),
    (("device", "device", "host"), True),
    (("host", "device", "nvme"), True),
]
"""And whether the device has memory of its own."""


ACTS: dict[str, tuple[Callable[..., Optimizer], list[Act]]] = {
    "sgd": (sgd, [*EVERY, restart_momentum, delete_momentum, forget_momentum]),
    "adamw": (adamw, EVERY),
}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize(
    ("placement", "own_memory"),
    [pytest.param(*p, marks=[] if n in (0, 1) else pytest.mark.thorough, id="-".join(p[0])) for n, p in enumerate(PLACEMENTS)],
)
def test_what_a_script_does_to_states_counts(name: str, placement: Placement, own_memory: bool, drive: Path) -> None:
    make, acts = ACTS[name]
    if own_memory:
        torch.compiler.reset()  # graphs stay with the device for which they were compiled
    with simulating(SimulatedDevice()) if own_memory else contextlib.nullcontext():
        pair = Pair(placement, drive, make)
        pair.train(2)
        for act in acts:
            same(*pair.act(act))
            pair.train(2)
            pair.compare()
            if placement[2] == "nvme":
                assert all(type(states) is dict for states in pair.optimizer.state_dict()["state"].values())
                entries = [pair.optimizer.state[p] for p in pair.ours.parameters() if p.requires_grad and p.dim()]
                assert all(isinstance(entry, StateEntry) and entry.stored for entry in entries)
