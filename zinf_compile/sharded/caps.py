"""Caps on the memory of a rank, in bytes, as declared by options or as the process may use it, and the bytes held."""

from __future__ import annotations

import dataclasses
import gc

import torch

from zinf_compile.config import Config
from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.rank_memory import Memory
from zinf_compile.runtime.system.host_limits import usable_bytes
from zinf_compile.runtime.system.node import count_ranks, node_id, ranks_of_node

_PROCESS = "what this process may use"


@dataclasses.dataclass(frozen=True)
class Caps:
    """Caps of this rank, in bytes, and their sources."""

    device: int
    host: int
    device_source: str
    host_source: str

    @property
    def names_host(self) -> bool:
        """Whether an option says how much host memory may be used."""
        return self.host_source != _PROCESS

    def on_device(self, topology: Topology) -> int:
        """Return the device's cap: both where host memory is the device."""
        return self.device if topology.host_apart else min(self.device, self.host)

    def with_whole(self, count: int, *, on_host: bool) -> Caps:
        """Return the caps for who counts shards of so many bytes that are still whole now; declared ones stay."""
        device = count if self.device_source == _PROCESS else 0
        host = count if self.host_source == _PROCESS and on_host else 0
        return dataclasses.replace(self, device=self.device + device, host=self.host + host)

    def options(self, topology: Topology) -> dict[str, int]:
        """Return the options that set the device's cap, each with the ranks that share it."""
        declared = {"device_memory": 1} if self.device_source == "option device_memory" else {}
        if self.host_source.startswith("option") and (not topology.host_apart or self.device_source == self.host_source):
            declared["host_memory"] = ranks_of_node()
        return declared


def agree_on_device(context: Context) -> None:
    """Let several ranks go by the memory and the rates of the one that has least: plans must not differ.

    And by the number of those that share a node. Collective, once for each context.
    """
    if context.rates is None:
        mine = torch.tensor(context.link.rates().row(), dtype=torch.float64)
        context.rates = DeviceRates.of_row(context.ranks.exchange(mine, what="the rates of each rank's device").amin(0).tolist())
    if context.size > 1 and context.memory.usable is None:
        here = torch.tensor([node_id()], dtype=torch.float64)
        count_ranks(context.ranks.exchange(here, what="the node of each rank").flatten().tolist())
        mine = torch.tensor(usable_bytes(context.device), dtype=torch.float64)
        device, host = context.ranks.exchange(mine, what="the memory that each rank may use").amin(0).tolist()
        context.memory.usable = int(device), int(host)


def find_caps(config: Config, context: Context, *, held: int) -> Caps:
    """Return the caps of this rank: those declared, otherwise what the process may use, `held` bytes included."""
    device = context.device
    usable_device, usable_host = context.memory.usable or usable_bytes(device)
    declared = None if config.device_memory is None else parse_bytes(config.device_memory, option="device_memory")
    of_node = None if config.host_memory is None else parse_bytes(config.host_memory, option="host_memory")
    host = usable_host + held if of_node is None else of_node // ranks_of_node()
    host_source = _PROCESS if of_node is None else f"option host_memory, for {ranks_of_node()} ranks of a node"
    if declared is not None:
        return Caps(declared, host, "option device_memory", host_source)
    if device.type == "cpu":
        return Caps(host, host, host_source, host_source)
    return Caps(usable_device + held, host, _PROCESS, host_source)


class Collection:
    """Frees what nobody uses any more, once for a graph: each takes a good part of a second."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self) -> None:
        """Free it, at the first call: compiling a graph takes no memory that is planned for."""
        if not self._done:
            self._done = True
            gc.collect()


def collect_unused(context: Context, caps: Caps, collect: Collection, *, declared: bool) -> None:
    """Free what nobody uses any more where memory is scarce or was `declared` to be: a model of many graphs waits for each."""
    held, on_host = (ledger.total()[0] for ledger in (context.memory.ledger, context.memory.host_ledger))
    if declared or 2 * held > caps.device or 2 * on_host > caps.host:
        collect()


def held_bytes(ledger: Ledger, more: int, cap: int, memory: Memory | None = None, *, begins: bool = False) -> int:
    """Return the bytes that an account holds, but for blocks that are staged, which are planned for.

    Where `more` don't fit beside them, without models and graphs that nobody uses any more; and in a rank's `memory` without what
    earlier graphs have in flight to the device and to other ranks, whose room the transient memory includes, and those gradients
    that a deferred step has still to apply: a graph that has no room beside these waits. One that `begins` may bring units while
    gradients still leave a device with memory of its own, and waits for these before it computes.
    """

    def held() -> int:
        return ledger.total()[0] - ledger.now()["bounce"]

    def enough() -> bool:
        return held() + more <= cap

    if not enough() and memory is not None:
        memory.wait_copied(ledger, enough)
        if begins and ledger is memory.ledger is not memory.host_ledger:
            left = held() - memory.inflight_gradients.held
            if left + more <= cap:
                memory.lets_leave = True
                return left
        memory.inflight_gradients.drain(enough)
    if not enough():
        gc.collect()
    if not enough() and memory is not None and not memory.pending_gradients.wait():
        return held() - memory.pending_gradients.bytes()[ledger is not memory.ledger]
    return held()
