"""A function on shards, a piece at a time: the next piece is read, and the last one written, while one is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.units.shard_values import Fetch, ShardValues, pieces_of
from zinf_compile.runtime.units.unit import Unit

Pieces = dict[int, torch.Tensor]
"""The pieces of the operands, by what the caller calls them."""


def over_pieces(
    unit: Unit,
    operands: Mapping[int, ShardValues],
    function: Callable[[Pieces, int, int], torch.Tensor | None],
    *,
    unread: frozenset[int] = frozenset(),
    into: Callable[[torch.Tensor], ShardValues] | None = None,
) -> None:
    """Call `function` with the pieces [start, end) of all operands, in host memory; keep what it returns.

    `unread` are operands whose old values it doesn't need. `into` says, given the first result, where results are kept.
    """
    context = unit.context
    spans = pieces_of(unit)
    fetched: list[dict[int, Fetch]] = []
    target: ShardValues | None = None
    writing: Pending | None = None

    def start(span: tuple[int, int]) -> None:
        fetched.append({key: values.fetch(*span) for key, values in operands.items() if key not in unread})

    for span, following in itertools.zip_longest(spans, spans[1:]):
        with context.lanes.meter.waiting():
            if not fetched:
                start(span)
            if following is not None and _has_room(unit, operands, following):
                start(following)
            arriving = fetched.pop(0)
            pieces = {key: fetch() for key, fetch in arriving.items()}
        pieces |= {key: context.memory.staged_buffer(span[1] - span[0], operands[key].dtype) for key in unread}
        result = function(pieces, *span)
        if result is None or into is None:
            continue
        target = target or into(result)
        with context.lanes.meter.waiting():
            if writing is not None:
                writing.wait()
            writing = target.write(span[0], result.reshape(-1).contiguous())
    if writing is not None:
        with context.lanes.meter.waiting():
            writing.wait()


def _has_room(unit: Unit, operands: Mapping[int, ShardValues], span: tuple[int, int]) -> bool:
    size = sum(format_of(values.dtype).bytes(span[1] - span[0]) for values in operands.values())
    return unit.context.memory.has_room(unit.context.memory.host_ledger, 2 * size)
