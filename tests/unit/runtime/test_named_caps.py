"""Caps that refusals name: by the options that allow less, `host_memory` for all ranks of a node."""

from __future__ import annotations

import pytest
from plain_memory import plain_memory

from zinf_compile.runtime.memory.named_caps import name_cap, name_host_memory

RANKS, WORKS = 3, 1000
DEVICE, HOST = "device_memory that works is 1,000", "host_memory that works is 3,000"


@pytest.fixture(autouse=True)
def _node_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS))


@pytest.mark.parametrize(
    ("device", "host", "named"),
    [
        (None, 999, f"The smallest {HOST}"),
        (999, None, f"The smallest {DEVICE}"),
        (999, 999, f"The smallest {DEVICE}; the smallest {HOST}"),
        (1000, 999, f"The smallest {HOST}"),
        (999, 1000, f"The smallest {DEVICE}"),
        (None, None, f"The smallest {DEVICE}"),
    ],
)
def test_where_the_device_is_host_memory_the_options_that_allow_less(device: int | None, host: int | None, named: str) -> None:
    memory = plain_memory()
    memory.reservations.declare(device=device, host=host)
    assert name_cap(memory, memory.ledger, WORKS) == named


@pytest.mark.parametrize("declared", [None, 10])
def test_beside_a_device_each_account_has_its_option(declared: int | None) -> None:
    memory = plain_memory(host_apart=True)
    memory.reservations.declare(device=declared, host=declared)
    assert name_cap(memory, memory.ledger, WORKS) == f"The smallest {DEVICE}"
    assert name_cap(memory, memory.host_ledger, WORKS) == f"The smallest {HOST}"


def test_one_that_may_not_be_the_smallest() -> None:
    assert name_host_memory(WORKS, smallest=False) == f"a {HOST}"
