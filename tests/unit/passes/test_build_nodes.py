"""Fake values of the nodes that passes insert."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from zinf_compile.ir import ops
from zinf_compile.passes.graph.build_nodes import new_move


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(3, 4, 5),
        torch.empty(3, 4, 5).transpose(0, 2),
        torch.empty(8, 9)[1:4, 2:5],
        torch.empty(3, 1).expand(3, 7),
        torch.empty(0, 4),
        torch.empty((), dtype=torch.int64),
    ],
)
def test_a_move_has_the_fake_value_that_its_operator_makes(value: torch.Tensor) -> None:
    """Of strided values with gaps, of equal elements, of none: in memory of its own."""
    mode = FakeTensorMode()
    fake = mode.from_tensor(value)
    with mode:
        (there,) = ops.swap_values_out([fake], "device", "host")
        expected = ops.wait_value([there], 0)
    graph = fx.Graph()
    source = graph.placeholder("value")
    source.meta["val"] = fake
    handle = new_move(graph, mode, ops.swap_values_out, ([source], "device", "host"), "offloaded", [fake])
    found = new_move(graph, mode, ops.wait_value, (handle, 0), "value_saved", fake).meta["val"]
    (moved,) = handle.meta["val"]
    for each in (moved, found):
        assert each.fake_mode is mode
        assert (each.shape, each.dtype, each.device) == (expected.shape, expected.dtype, expected.device)
        assert each.stride() == expected.stride()
        assert each.untyped_storage()._cdata != fake.untyped_storage()._cdata
