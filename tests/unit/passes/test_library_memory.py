"""What PyTorch's kernels take beside their results on the CPU: counted, and as its allocator says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compute_models import allocated_at_most
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from zinf_compile.passes.analysis.compute_graph import ComputeGraph
from zinf_compile.passes.analysis.library_memory import library_bytes

aten = torch.ops.aten

ROWS = torch.randn(192, 256)
COLUMNS = torch.randn(256, 192).t()
COUNTS = torch.randint(9, (192, 256))
IS_KEPT = ROWS > 0
TOKENS = torch.randint(50, (192,))

CASES: dict[str, tuple[Any, ...]] = {
    "dropout": (aten.native_dropout.default, ROWS, 0.1, True),
    "dropout in bf16": (aten.native_dropout.default, ROWS.bfloat16(), 0.1, True),
    "dropout backward": (aten.native_dropout_backward.default, ROWS, IS_KEPT, 1.1),
    "softmax that may be masked": (aten._safe_softmax.default, ROWS, -1),
    "softmax of columns": (aten._softmax.default, COLUMNS, -1, False),
    "softmax of rows": (aten._softmax.default, ROWS, -1, False),
    "embedding backward": (aten.embedding_dense_backward.default, ROWS, TOKENS, 50, -1, False),
    "embedding backward of columns": (aten.embedding_dense_backward.default, COLUMNS, TOKENS, 50, -1, False),
    "layer norm of columns": (aten.native_layer_norm.default, COLUMNS, [256], None, None, 1e-5),
    "product with a mask": (aten.mul.Tensor, ROWS, IS_KEPT),
    "product of columns and rows": (aten.mul.Tensor, COLUMNS, ROWS),
    "product of counts and a number": (aten.mul.Tensor, COUNTS, 0.5),
    "product of bf16 and fp32": (aten.mul.Tensor, ROWS.bfloat16(), ROWS),
    "quotient of counts": (aten.div.Tensor, COUNTS, COUNTS),
    "comparison of counts and numbers": (aten.lt.Tensor, COUNTS, ROWS),
    "number of no dimension": (aten.mul.Tensor, ROWS, torch.tensor(2.0, dtype=torch.float64)),
    "choice": (aten.where.self, IS_KEPT, ROWS, COLUMNS),
    "copy of columns": (aten.clone.default, COLUMNS),
    "conversion": (aten._to_copy.default, COUNTS),
}


def traced(target: Any, *args: Any) -> fx.Node:
    """Return a node that calls an operator on tensors like these."""
    mode, graph = FakeTensorMode(), fx.Graph()
    fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
    nodes = []
    for number, fake in enumerate(fakes):
        nodes.append(graph.placeholder(f"x{number}") if isinstance(fake, torch.Tensor) else fake)
        if isinstance(fake, torch.Tensor):
            nodes[-1].meta["val"] = fake
    node = graph.call_function(target, tuple(nodes))
    with mode:
        node.meta["val"] = target(*fakes)
    return node


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_takes_what_is_counted(name: str) -> None:
    target, *args = CASES[name]
    node = traced(target, *args)
    graph = ComputeGraph(node.graph, torch.device("cpu"), by_operator=True)
    counted = sum(size for _, size in graph.made(node)) + library_bytes(node, graph)
    target(*args)  # once before, in case a library sets something up
    taken = allocated_at_most(lambda: target(*args))
    assert 0.9 * counted <= taken <= counted + 256  # scalars


def test_compiled_kernels_convert_as_they_compute() -> None:
    node = traced(*CASES["product with a mask"])
    assert library_bytes(node, ComputeGraph(node.graph, torch.device("cpu"), by_operator=False)) == 0
    assert library_bytes(node, ComputeGraph(node.graph, torch.device("meta"), by_operator=True)) == 0
