"""Deferred random fills: made when the value is read, or while it is written to a drive, each rank its own pieces."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from zinf_compile.runtime.memory.ledger import Ledger

from .materializing import MaterializingParameter
from .parallel_random import Fill, plan_fill
from .shard_writer import BYTES_ON_THE_WAY, PieceWriter


class DeferredFills:
    """Records how parameters are drawn. Those of the current module may be drawn again; those of earlier ones are written."""

    def __init__(self, ledger: Ledger, *, most_bytes: int, at_once: bool) -> None:
        """`at_once`: begin to write while others are noted; False where most are drawn again, later."""
        self._at_once = at_once
        self._noted: dict[int, tuple[weakref.ref[MaterializingParameter], Fill]] = {}
        self._being_written: set[int] = set()
        self._writer = PieceWriter(ledger, most_bytes=min(most_bytes, BYTES_ON_THE_WAY), threads=torch.get_num_threads())

    def note(self, parameter: MaterializingParameter, func: Any, settings: Sequence[float]) -> bool:
        """Note which operator draws a parameter; return whether that could be done."""
        fill = plan_fill(func, parameter.numel(), parameter.dtype, settings)
        if fill is None:
            return False
        self.take(parameter)
        self._noted[id(parameter)] = weakref.ref(parameter), fill
        parameter._zinf_materialization.filled = True
        if self._at_once:
            self._send(but=parameter._zinf_materialization.owner)
        return True

    def take(self, parameter: MaterializingParameter) -> Fill | None:
        """Return what was noted of a parameter whose value is about to be made or replaced; its place is no longer written to."""
        _, fill = self._noted.pop(id(parameter), (None, None))
        if id(parameter) in self._being_written:
            self._writer.drain()
            self._being_written.clear()
        return fill

    def finish(self) -> list[MaterializingParameter]:
        """Return when all is kept that can be made piece by piece; return the parameters that can't."""
        self._send(but=None)
        self._writer.close()
        left = [parameter for reference, _ in self._noted.values() if (parameter := reference()) is not None]
        return [parameter for parameter in left if parameter._zinf_materialization.place is not None]

    def drop(self) -> None:
        """Forget everything. What is being written is written to its end."""
        self._noted.clear()
        self._writer.abandon()

    def _send(self, *, but: int | None) -> None:
        for key, (reference, fill) in list(self._noted.items()):
            parameter = reference()
            materialization = None if parameter is None else parameter._zinf_materialization
            if (
                materialization is None
                or materialization.place is None
                or materialization.owner == but
                or not materialization.place.fill(fill, self._writer)
            ):
                continue
            materialization.checksum, materialization.kept = fill.identity(), True
            self._being_written.add(key)
            del self._noted[key]
