"""What is dropped in a forward and made again in its backward, as both graphs carry it, and marks of compute that runs again.

The backend decides right after the cut; the passes of `passes/activations` act on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

_REMADE, _AGAIN, _RESULT, _DROPPED = "zinf_remade", "zinf_again", "zinf_result", "zinf_dropped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemadeBlock:
    """Compute of the forward that runs again, all of it in front of the first reader of what it makes."""

    compute: tuple[tuple[fx.Node, ...], ...]
    """What is compiled as one each, in order. Nodes are those of `Remade.forward`."""
    dropped: tuple[str, ...]
    """Saved values that it makes, by the name that both graphs have for them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remade:
    """All blocks of a forward and its backward that are made again."""

    forward: fx.Graph
    """A copy of the forward as it will be compiled, with its gathers just in time."""
    blocks: tuple[RemadeBlock, ...]
    """In the order of the forward."""
    carried: Mapping[str, str]
    """By the name of a value of the forward that blocks read: the backward's placeholder that has it."""
    states: Mapping[str, Mapping[str, str]]
    """By the name of the first operator that draws in its compute: by device, the name of the generator's state."""

    @property
    def dropped(self) -> frozenset[str]:
        """Names of all values that are dropped."""
        return frozenset(name for block in self.blocks for name in block.dropped)

    def __deepcopy__(self, memo: Any) -> Remade:
        """Return it: a copy of a graph is made again from the same forward."""
        return self


def mark_remade(forward: fx.GraphModule, backward: fx.GraphModule, remade: Remade) -> None:
    """Record in both graphs of a pair what is dropped and made again."""
    forward.meta[_DROPPED] = backward.meta[_REMADE] = remade
    for node in backward.graph.nodes:
        if node.op == "placeholder" and node.name in remade.dropped:
            node.meta[_DROPPED] = True


def dropping(gm: fx.GraphModule) -> Remade | None:
    """Return what a forward drops."""
    return gm.meta.get(_DROPPED)


def remaking(gm: fx.GraphModule) -> Remade | None:
    """Return what a backward makes again."""
    return gm.meta.get(_REMADE)


def is_dropped(node: fx.Node) -> bool:
    """Return whether a placeholder stands for a value that was dropped, so that it holds nothing."""
    return bool(node.meta.get(_DROPPED))


def mark_again(node: fx.Node, *, is_result: bool) -> None:
    """Mark an operator as the forward's, run again; `is_result`: compute that follows it in the forward reads it."""
    node.meta[_AGAIN] = True
    if is_result:
        node.meta[_RESULT] = True


def runs_again(node: fx.Node) -> bool:
    """Return whether the operator is the forward's, run again in the backward."""
    return bool(node.meta.get(_AGAIN))


def is_result(node: fx.Node) -> bool:
    """Return whether it is a result of compute that runs again, whether or not it is read."""
    return bool(node.meta.get(_RESULT))
