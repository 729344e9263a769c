"""Inputs and outputs of compute between two transfers, as it is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .node_facts import symbols_of, symbols_read_off
from .remade import is_result


def boundary_of(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values that operators read from outside, in the order in which they do, and those that are read outside.

    Of compute that runs a second time, all results of the first are results again.
    """
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source.op != "get_attr":
                inputs[source] = None
    outputs = [node for node in nodes if is_result(node) or any(user not in inside for user in node.users)]
    return list(inputs), outputs


class SizeInputs:
    """Placeholders that carry the graph's symbols. A region whose input has size `s - 2` also needs `s` as an input."""

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        self._numbers = {symbol: node for node in placeholders if not _is_tensor(node) for symbol in symbols_read_off(node)}

    def missing(self, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the placeholders of the symbols that a region's inputs depend on and don't carry themselves."""
        needed = {symbol for node in inputs for symbol in symbols_of(node)}
        needed -= {symbol for node in inputs for symbol in symbols_read_off(node)}
        return [self._numbers[symbol] for symbol in sorted(needed & self._numbers.keys(), key=str)]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
