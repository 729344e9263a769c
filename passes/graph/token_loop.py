"""The operator that computes a slice of tokens at a time: its target is the loop itself, with the slice's operators as a graph.

`tile_tokens` makes loops. Interpreters and generated code run them operator by operator; `backend/regions` compiles their bodies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from .region_structure import structure

Body = Callable[[list[Any]], Sequence[Any]]
"""Computes one slice. Takes a list of values, which it may empty: rows, whole values, sums so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowsIn:
    """An input of which a slice has some rows, or such a result."""

    lead: int
    """The number of dimensions that count tokens, the first ones."""
    like: int = -1
    """For a result: the input with the same sizes in these dimensions; -1: `sizes` has them."""
    sizes: tuple[int, ...] = ()
    width: tuple[int, ...] = ()
    """For a result: the other dimensions."""
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SumOut:
    """A result that is summed over all tokens."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the result, and of a slice's part."""
    summed_in: torch.dtype
    inside: bool
    """Whether the slice adds its part to the sum so far itself, which is then its input."""


class TokenLoop:
    """A loop over slices of tokens. Call it with all its inputs: first `rows`, then what each slice reads whole.

    Slices are `tile` rows each, the last one what is left. `bodies` are the graphs of a slice by its number of rows; a graph of
    any number, which takes it as its last input, has the key 0.
    """

    __module__ = __name__
    __name__ = __qualname__ = "token_loop"

    def __init__(
        self,
        *,
        tile: int,
        rows: Sequence[RowsIn],
        outs: Sequence[RowsIn | SumOut],
        bodies: dict[int, fx.GraphModule],
    ) -> None:
        self.tile = tile
        self.rows = tuple(rows)
        self.outs = tuple(outs)
        self.bodies = bodies

    @property
    def body(self) -> fx.GraphModule:
        """Return the graph of a whole slice."""
        return next(iter(self.bodies.values()))

    def tokens(self, inputs: Sequence[torch.Tensor]) -> int:
        """Return the number of tokens of traced inputs, dynamic sizes as traced."""
        sizes = inputs[0].shape[: self.rows[0].lead]
        return math.prod(int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size for size in sizes)

    def __str__(self) -> str:
        """Return a text that is equal for loops of equal structure."""
        return f"token_loop{(self.tile, self.rows, self.outs, [(n, structure(body)) for n, body in self.bodies.items()])}"

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """Run the loop, operator by operator."""
        return self.run({rows: partial(_call, body) for rows, body in self.bodies.items()}, list(inputs))

    def run(self, bodies: dict[int, Body], inputs: list[Any]) -> list[torch.Tensor]:
        """Run the loop by the functions of `bodies`; `inputs` is emptied."""
        rows = [value.flatten(0, form.lead - 1) for value, form in zip(inputs, self.rows, strict=False)]
        whole = inputs[len(rows) :]
        leads = [value.shape[: form.lead] for value, form in zip(inputs, self.rows, strict=False)]
        inputs.clear()
        tokens, device = rows[0].shape[0], rows[0].device
        outs: list[torch.Tensor | None] = [None] * len(self.outs)
        sums = []
        for place, out in enumerate(self.outs):
            if isinstance(out, RowsIn):
                outs[place] = torch.empty((tokens, *out.width), dtype=out.dtype, device=device)
            elif out.inside:
                total = outs[place] = torch.zeros(out.shape, dtype=out.summed_in, device=device)
                sums.append(total)
        for start in range(0, tokens, self.tile):
            end = min(start + self.tile, tokens)
            parts = self._slice(bodies, rows, whole, sums, start, end)
            for place, (out, part) in enumerate(zip(self.outs, parts, strict=True)):
                found = outs[place]
                if isinstance(out, RowsIn):
                    assert found is not None
                    found[start:end].copy_(part.reshape(end - start, *out.width))
                elif not out.inside:
                    outs[place] = part.to(out.summed_in) if found is None else found.add_(part)
            del parts, part, found
        return [self._finished(out, found, leads, device) for out, found in zip(self.outs, outs, strict=True)]

    def _slice(
        self, bodies: dict[int, Body], rows: list[torch.Tensor], whole: list[Any], sums: list[torch.Tensor], start: int, end: int
    ) -> Sequence[torch.Tensor]:
        size = end - start
        given: list[Any] = [
            value[start:end].view(*[1] * (form.lead - 1), size, *value.shape[1:])
            for value, form in zip(rows, self.rows, strict=True)
        ]
        given += [*whole, *sums]
        body = bodies.get(size)
        if body is None:
            body = bodies[0]
            given.append(size)
        return body(given)

    def _finished(
        self, out: RowsIn | SumOut, found: torch.Tensor | None, leads: Sequence[Sequence[int]], device: torch.device
    ) -> torch.Tensor:
        if isinstance(out, SumOut):
            return torch.zeros(out.shape, dtype=out.dtype, device=device) if found is None else found.to(out.dtype)
        assert found is not None
        if out.lead == 1:
            return found
        return found.view(*(out.sizes if out.like < 0 else leads[out.like]), *out.width)


def _call(body: fx.GraphModule, args: list[Any]) -> Any:
    return body(*args)


def is_token_loop(node: object) -> bool:
    """Return whether a value is a node that computes a slice of tokens at a time."""
    return isinstance(node, fx.Node) and isinstance(node.target, TokenLoop)
