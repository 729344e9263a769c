"""What graphs to come may compute, as far as the results of the first and the parameters say."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.sharded.compute_to_come import COPIES, compute_to_come

FLOAT = 4


def forward(*shapes: tuple[int, ...] | None) -> fx.Graph:
    """Return a graph that returns values of these shapes; None: a number."""
    graph, values = fx.Graph(), []
    for number, shape in enumerate(shapes):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = None if shape is None else torch.empty(shape, device="meta")
        values.append(node)
    graph.output(tuple(values))
    return graph


def parameter(*shape: int) -> ParameterSlot:
    return ParameterSlot.of(torch.empty(shape, device="meta"), "p")


@pytest.mark.parametrize(
    ("shapes", "results", "parameters", "numel"),
    [
        ([(2, 8, 16)], None, [], 256),
        ([(2, 8, 16), (100, 100)], 1, [], 256),
        ([(2, 8, 16)], None, [parameter(1000, 16), parameter(16, 64)], 16 * 1000),
        ([(2, 8, 16)], None, [parameter(16, 1000)], 16 * 1000),
        ([(2, 8, 16)], None, [parameter(1000, 32), parameter(5000), parameter(64, 16, 3, 3)], 256),
        ([(), (2, 8, 16)], None, [], 0),
        ([(), (2, 8, 16)], None, [parameter(1000, 16)], 16 * 1000),
        ([None, (0, 0)], None, [parameter(1000, 16)], 0),
    ],
)
def test_results_count_and_their_products_with_matrices_that_fit(
    shapes: list[tuple[int, ...] | None], results: int | None, parameters: list[ParameterSlot], numel: int
) -> None:
    assert compute_to_come(forward(*shapes), results, parameters) == COPIES * FLOAT * numel
