"""Choices that all ranks make alike, once per parameter, from sizes that they exchange; later graphs reuse them.

Two choices: gather an embedding's rows or its whole parameter, and compute a head's loss in chunks or not. `graph_compiler` binds
them to the passes.

Note: choices and collectives
    Both choices change a graph's transfers, which must be the same on all ranks for any batch. They are made when the first graph
    with a lookup or a loss is compiled, which all ranks do at the same call. The unit stores them. A copy, keyed by the
    parameter's name and shape, serves graphs that one rank later compiles alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import BLOCK_BYTES
from zinf_compile.passes.graph.alias import ALIASES, MOVES, is_cast
from zinf_compile.passes.graph.node_facts import fake_value, parameters, slot_of
from zinf_compile.passes.loss._find import find_losses
from zinf_compile.passes.loss._read_logits import Logits, source_product
from zinf_compile.passes.loss.chunk_loss import logits_bytes
from zinf_compile.passes.schedule.insert_row_lookups import find_lookups, rows_named
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.create import shard_group_of
from zinf_compile.sharded.parameter import unit_of

ROWS, CHUNKS = "rows", "chunks"


class Choices:
    """The choices for the parameters of one graph."""

    def __init__(
        self, slots: Sequence[ParameterSlot], inputs: Sequence[Any], context: Context, placements: Placements, *, first: bool
    ) -> None:
        """`first`: all ranks compile this graph, as a function's first one; a further one may be that of one rank alone."""
        self._slots, self._inputs, self._context, self._placements = slots, inputs, context, placements
        self._chosen: dict[tuple[str, int], bool] = {}
        """Keyed by kind and `ParameterSlot.index`."""
        units = [unit for slot in slots if (unit := unit_of(inputs[slot.index])) is not None]
        self._shards = shard_group_of(units, context).size
        for slot in slots:
            unit = unit_of(inputs[slot.index])
            for kind in (ROWS, CHUNKS):
                known = None if unit is None else unit.chosen.get(kind)
                if known is None and not first:
                    known = context.chosen.get(_key(kind, slot))
                if known is not None:
                    self._chosen[kind, slot.index] = known

    def rows(self, slot: ParameterSlot) -> bool:
        """Return whether a graph that reads a parameter only by rows gathers its rows."""
        return self._chosen.get((ROWS, slot.index), False)

    def chunks(self, logits: Logits) -> bool:
        """Return whether a loss of these logits is computed in chunks."""
        slot = _parameter_behind(logits.weight)
        return slot is not None and self._chosen.get((CHUNKS, slot.index), False)

    @property
    def several(self) -> bool:
        """True if several ranks gather the parameters."""
        return max(self._shards, self._context.size) > 1

    @property
    def any_chunks(self) -> bool:
        """True if a loss is chunked by an earlier choice."""
        return any(kind == CHUNKS and chosen for (kind, _), chosen in self._chosen.items())

    @property
    def may_chunk(self) -> bool:
        """True if a loss is chunked, or undecided, for some head."""
        return self.any_chunks or any((CHUNKS, slot.index) not in self._chosen for slot in self._slots if len(slot.shape) == 2)

    def decide(self, graph: fx.Graph, *, losses: bool, worth_bytes: int) -> None:
        """Make the open choices for a graph's lookups and, with `losses`, its heads.

        Collective if any choice is open, which depends on the graph alone and is the same on all ranks.
        """
        lookups = {slot.index: found for unit, slot in parameters(graph) if (found := find_lookups(unit, slot))}
        logits = _losses(graph) if losses else {}
        tables = [s for s in self._slots if s.index in lookups and (ROWS, s.index) not in self._chosen]
        heads = [s for s in self._slots if s.index in logits and (CHUNKS, s.index) not in self._chosen]
        if not tables and not heads:
            return
        figures = [rows_named(lookups[s.index]) for s in tables] + [logits[s.index] for s in heads]
        with outside_tracing():
            all_ranks = self._context.ranks.exchange(
                torch.tensor(figures, dtype=torch.float64), what="sizes of lookups and logits"
            )
            most = all_ranks.amax(0).tolist()
        for slot, tokens in zip(tables, most[: len(tables)], strict=True):
            self._choose(ROWS, slot, self._is_cheaper(slot, int(tokens)))
        for slot, largest in zip(heads, most[len(tables) :], strict=True):
            self._choose(CHUNKS, slot, worth_bytes < largest < math.inf)

    def keep(self) -> None:
        """Store the choices in the units, once the parameters are partitioned."""
        for slot in self._slots:
            unit = unit_of(self._inputs[slot.index])
            for kind in (ROWS, CHUNKS):
                if unit is not None and (kind, slot.index) in self._chosen:
                    unit.chosen.setdefault(kind, self._chosen[kind, slot.index])
        self._inputs = ()  # compiled code outlives the model: drop its parameters

    def _choose(self, kind: str, slot: ParameterSlot, chosen: bool) -> None:
        self._chosen[kind, slot.index] = self._context.chosen[_key(kind, slot)] = chosen

    def _is_cheaper(self, slot: ParameterSlot, tokens: int) -> bool:
        """Return whether the rows of up to `tokens` indices per rank are fewer bytes than the parameter."""
        size, home = self._shards, self._placements.of(slot).params
        row = slot.bytes // max(1, slot.shape[0])
        shard = slot.format.bytes(math.ceil(slot.numel / size))
        rows = min(tokens, slot.shape[0]) * row
        between = size > 1
        if not home.in_memory:
            blocks = math.ceil(shard / BLOCK_BYTES)
            read = min(shard, min(size * tokens, blocks) * BLOCK_BYTES)
        else:
            read = min(shard, size * rows)
        moves = self._context.link.topology.is_offloaded(home)
        return tokens > 0 and rows * between + read * moves < slot.bytes * between + shard * moves


def _losses(graph: fx.Graph) -> dict[int, float]:
    """Return the bytes of the largest logits of each head, keyed by slot; infinity if one of its losses can't be chunked."""
    found, skipped = find_losses(graph)
    largest: dict[int, float] = {}
    for loss in found:
        slot = _parameter_behind(loss.logits.weight)
        if slot is not None:
            largest[slot.index] = max(largest.get(slot.index, 0), logits_bytes(fake_value(loss.logits.product)))
    for one in skipped:
        slot = _head_behind(one.softmax)
        if slot is not None:
            largest[slot.index] = math.inf
    return largest


def _head_behind(softmax: fx.Node) -> ParameterSlot | None:
    """Return the slot of the head whose logits a log-softmax reads, even of one that can't be chunked."""
    product = source_product(softmax)
    operands = product.all_input_nodes if product is not None else []
    return next((slot for operand in reversed(operands) if (slot := _parameter_behind(operand)) is not None), None)


def _parameter_behind(node: fx.Node) -> ParameterSlot | None:
    while slot_of(node) is None and node.all_input_nodes and (is_cast(node) or node.target in ALIASES or node.target in MOVES):
        node = node.all_input_nodes[0]
    return slot_of(node)


def _key(kind: str, slot: ParameterSlot) -> Hashable:
    return kind, slot.name, slot.shape, slot.dtype
