"""Lookups in a tiled parameter: its rows, from the ranks and tiers that have them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from zinf_compile.errors import StepFailedError
from zinf_compile.ir.row_rounds import Round, rounds_of_rows
from zinf_compile.runtime.lanes.lanes import wait_for_all
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of

from .backing import NvmeBacking

if TYPE_CHECKING:
    from .unit import Unit

Span = tuple[int, int]

_FAILED = 2.0
"""What a rank says whose last step failed, in the place of whether indices are out of range."""


def gather_rows(unit: Unit, indices: torch.Tensor, where: str) -> torch.Tensor:
    """Return `embedding(unit, indices)`, of shape [*indices.shape, columns]; a collective operation.

    Each row that a rank's indices name comes to it once, and no other does; from a drive come the blocks that hold such rows.
    Raises on all ranks, where one of them has an index out of range, or its last step failed: nothing has moved then.
    """
    if unit.at_hand:
        return torch.nn.functional.embedding(indices, unit.whole())
    rows, columns = unit.shape
    what = f"looking rows of {unit.name} up in {where}"
    wanted, order = indices.reshape(-1).to("cpu", torch.int64).sort()
    distinct, place = torch.unique_consecutive(wanted, return_inverse=True)
    rounds = rounds_of_rows(unit.shape, unit.stride, unit.boxes, unit.format)
    borders = torch.tensor([part.first for part in rounds] + [rows])
    ends = torch.searchsorted(distinct, borders).tolist()
    outside = bool(wanted.numel()) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < rows
    failed = _failed_update(unit)
    counts = torch.tensor(
        [_FAILED if failed else int(outside), *(end - start for start, end in itertools.pairwise(ends))], dtype=torch.float64
    )
    asked = unit.ranks.exchange(counts, what=f"rows of {unit.name} asked for")
    if failed is not None:
        raise failed
    if asked[:, 0].any():
        raise _refused(unit, wanted, asked[:, 0].tolist())
    found = torch.empty(wanted.numel(), columns, dtype=unit.dtype, device=unit.device)
    tokens = torch.searchsorted(wanted, borders).tolist()
    for number, part in enumerate(rounds):
        if not asked[:, 1 + number].any():
            continue
        values = _Round(unit, part, distinct[ends[number] : ends[number + 1]]).run(what)
        for start in range(tokens[number], tokens[number + 1], part.last - part.first):
            some = slice(start, min(start + part.last - part.first, tokens[number + 1]))
            taken = (place[some] - ends[number]).to(unit.device)
            found.index_copy_(0, order[some].to(unit.device), values.index_select(0, taken))
        del values
    return found.view(*indices.shape, columns)


def _failed_update(unit: Unit) -> Exception | None:
    """Wait for steps that have to update the rows; return the error of one that failed on this rank."""
    try:
        unit.wait_updated()
        unit.check_whole()
    except StepFailedError as error:
        return error
    return None


def _refused(unit: Unit, wanted: torch.Tensor, verdicts: list[float]) -> Exception:
    """Return the error of a lookup that some ranks can't do; this one could."""
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict == _FAILED]
    if failed:
        return StepFailedError(
            f"a step failed on rank {failed[0]}, see its error, before rows of {unit.name} were looked up. Load a checkpoint of "
            "model and optimizer on all ranks to go on from there"
        )
    ranks = [rank for rank, verdict in enumerate(verdicts) if verdict]
    me = unit.shard_group.rank
    here = f" (from {int(wanted[0])} to {int(wanted[-1])} on this one, rank {me})" if me in ranks else ""
    return IndexError(
        f"index out of range in self: {unit.name} has {unit.shape[0]} rows, and indices lie beyond them on rank "
        f"{', '.join(map(str, ranks))}{here}"
    )


class _Round:
    """The transfer of some rows: each rank asks those that have parts of the rows it wants, and sends what it was asked for."""

    def __init__(self, unit: Unit, part: Round, wanted: torch.Tensor) -> None:
        self._unit, self._context, self._group = unit, unit.context, unit.shard_group
        self._columns = unit.shape[1]
        self._wanted = wanted
        self._shard_span = unit.spans[part.tile]
        self._span = (part.first * self._columns, part.last * self._columns)
        self._here = self._part_of(self._group.rank)
        self._shift = self._shard_span.place - self._shard_span.part_of(self._group.rank)[0]
        """From an element's number in the flat unit to its place in this rank's shard."""

    def run(self, what: str) -> torch.Tensor:
        """Return the rows this rank wants, one after the other."""
        context, unit = self._context, self._unit
        context.memory.make_room(context.memory.ledger, unit.format.bytes(self._wanted.numel() * self._columns))
        rows = context.gather_buffer(self._wanted.numel() * self._columns, unit.dtype, unit.device)
        context.memory.ledger.track("gathered", rows)
        window, blocks = self._make_window()

        def move() -> None:
            requests = self._ask()
            own = self._read(window, blocks, torch.cat(requests)) if blocks else window
            sent = [self._pick(own, ids) for ids in requests]
            received = [rows[slice(*self._place(peer))] for peer in range(self._group.size)]
            count = sum(part.nbytes for peer, part in enumerate(received) if peer != self._group.rank)
            with moving([context.lanes.meter], "from ranks", count, what):
                unit.gathers.exchange(sent, received)
            context.lanes.meter.moved("from ranks", count)

        context.finish(context.lanes.start(context.lanes.gather, move), what)
        return rows.view(-1, self._columns)

    def _part_of(self, rank: int) -> Span:
        """Return the elements of the round that a rank has, as a span of the flat unit; empty where none."""
        start, end = self._shard_span.part_of(rank)
        start = max(start, self._span[0])
        return start, max(start, min(end, self._span[1]))

    def _rows_within(self, ids: torch.Tensor, span: Span) -> Span:
        """Return the range of these rows that have elements in a span."""
        if span[0] == span[1]:
            return 0, 0
        return _between(ids, span[0] // self._columns, -(-span[1] // self._columns))

    def _place(self, rank: int) -> Span:
        """Return the range, among the elements of the wanted rows, of those that a rank has."""
        span = self._part_of(rank)
        first, last = self._rows_within(self._wanted, span)
        if first == last:
            return 0, 0
        before = max(0, span[0] - int(self._wanted[first]) * self._columns)
        behind = max(0, (int(self._wanted[last - 1]) + 1) * self._columns - span[1])
        return first * self._columns + before, last * self._columns - behind

    def _ask(self) -> list[torch.Tensor]:
        """Exchange the rows that each rank wants; return those that each wants of this one."""
        size, gathers = self._group.size, self._unit.gathers
        mine = [self._wanted[slice(*self._rows_within(self._wanted, self._part_of(rank)))] for rank in range(size)]
        if size == 1:
            return mine
        device = self._unit.device
        counts = torch.empty(size, dtype=torch.int64, device=device)
        own = torch.tensor([ids.numel() for ids in mine], device=device)
        gathers.exchange(list(own.split(1)), list(counts.split(1)))
        requests = [torch.empty(count, dtype=torch.int64, device=device) for count in counts.tolist()]
        gathers.exchange([ids.to(device) for ids in mine], requests)
        return [ids.cpu() for ids in requests]

    def _make_window(self) -> tuple[torch.Tensor, list[Span]]:
        """Return this rank's part of the round; from a drive, memory for the blocks that hold it, and where these lie in it."""
        unit, context = self._unit, self._context
        start, end = self._here
        if not isinstance(unit.backing, NvmeBacking):
            shard = unit.shard if unit.backing is None else unit.resident
            assert shard is not None, "what is on no drive is in memory"
            return shard[start + self._shift : end + self._shift], []
        blocks = unit.backing.blocks(start + self._shift, end + self._shift) if end > start else []
        if not blocks:
            return torch.empty(0, dtype=unit.dtype), []
        size = blocks[-1][1] - blocks[0][0]
        if context.link.topology.host_apart:
            return context.memory.staged_buffer(size, unit.dtype), blocks
        context.memory.make_room(context.memory.ledger, unit.format.bytes(size))
        buffer = context.link.host_buffer(size, unit.dtype)
        context.memory.ledger.track("gathered", buffer)
        return buffer, blocks

    def _read(self, buffer: torch.Tensor, blocks: list[Span], ids: torch.Tensor) -> torch.Tensor:
        """Read the blocks with elements of these rows into their places; return this rank's part of the round."""
        backing = self._unit.backing
        assert isinstance(backing, NvmeBacking)
        (start, end), shift = self._here, self._shift
        base, ids = blocks[0][0], ids.unique()
        reads = []
        try:
            for first, last in blocks:
                inside = max(first - shift, start), min(last - shift, end)
                if range(*self._rows_within(ids, inside)):
                    part = on_host(buffer[first - base : last - base])
                    reads.append(move(backing.block(first), part, by=route_of(self._context)))
        finally:
            wait_for_all(read.wait for read in reads)
        return buffer[start + shift - base : end + shift - base]

    def _pick(self, own: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of some rows, one after the other, on the device."""
        (start, end), columns = self._here, self._columns
        first = -(-start // columns)  # rows from here on, and up to `last`, are here whole
        last = max(first, end // columns)
        lo, hi = _between(ids, first, last)
        edges = [
            [own[max(row * columns, start) - start : min((row + 1) * columns, end) - start] for row in some.tolist()]
            for some in (ids[:lo], ids[hi:])
        ]
        whole = own[first * columns - start : last * columns - start].view(-1, columns) if hi > lo else own[:0].view(0, columns)
        body = whole.index_select(0, (ids[lo:hi] - first).to(own.device)).view(-1)
        picked = torch.cat([*edges[0], body, *edges[1]]) if edges[0] or edges[1] else body
        if picked.device != self._unit.device:
            host, picked = picked, self._context.link.device_buffer(picked.numel(), picked.dtype)
            move(on_host(host), Location(picked), by=route_of(self._context)).wait()
        self._context.memory.ledger.track("gathered", picked)
        return picked


def _between(ids: torch.Tensor, first: int, last: int) -> Span:
    """Return where, among sorted numbers, those of [first, last) begin and end."""
    start, end = torch.searchsorted(ids, torch.tensor([first, last])).tolist()
    return start, end
