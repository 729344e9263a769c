"""The caps that refusals name, by the options that set them: `device_memory` is of one rank, `host_memory` of all of a node."""

from __future__ import annotations

from zinf_compile.runtime.system.node import ranks_of_node

from .ledger import Ledger
from .rank_memory import Memory


def options_to_raise(memory: Memory, ledger: Ledger, works: int) -> tuple[str, ...]:
    """Return the options with which this rank may hold `works` bytes of an account: where the device is host memory, one or both.

    `device_memory` where no option was given that allows less.
    """
    if ledger is not memory.ledger:
        return ("host_memory",)
    reservations = memory.reservations
    of_node = reservations.declared_host if memory.host_ledger is memory.ledger else None
    of_host = of_node is not None and of_node < works
    of_device = reservations.declared_device is not None and reservations.declared_device < works
    return (*["device_memory"] * (of_device or not of_host), *["host_memory"] * of_host)


def name_host_memory(works: int, *, smallest: bool = True) -> str:
    """Name the `host_memory` with which each rank of this node may hold `works` bytes."""
    return f"{'the smallest' if smallest else 'a'} host_memory that works is {works * ranks_of_node():,}"


def name_cap(memory: Memory, ledger: Ledger, works: int) -> str:
    """Return a sentence, without its end, that names the options with which this rank may hold `works` bytes of an account."""
    named = "; ".join(
        name_host_memory(works) if option == "host_memory" else f"the smallest {option} that works is {works:,}"
        for option in options_to_raise(memory, ledger, works)
    )
    return named[0].upper() + named[1:]
