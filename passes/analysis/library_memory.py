"""Memory that PyTorch's kernels take on the CPU beside their results, while they run: an upper bound, as far as it is known."""

from __future__ import annotations

import functools

import torch
from torch import fx

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import round_up
from zinf_compile.passes.graph.alias import is_cast, is_elementwise
from zinf_compile.passes.graph.node_facts import hinted_numel

from .compute_graph import ATTENTIONS, CONVOLUTIONS, ComputeGraph, hint_of, tensors_of

aten = torch.ops.aten

DROPOUTS = frozenset({aten.native_dropout, aten.native_dropout_backward})

IN_ROWS = frozenset(
    {aten.embedding_dense_backward}
    | {aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten._safe_softmax}
    | {aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward}
)
"""Operators that copy strided inputs to rows without gaps."""

BLOCK = 60 * 60
"""Elements of the block by which a matrix is transposed."""


def library_bytes(node: fx.Node, graph: ComputeGraph) -> int:
    """Return what an operator takes beside its inputs and results; nothing on devices other than the CPU."""
    packet = getattr(node.target, "overloadpacket", None)
    if graph.device.type != "cpu" or packet is None:
        return 0
    if packet in CONVOLUTIONS:  # oneDNN's copies of what it reads, in layouts of its own
        return sum(map(graph.bytes, tensors_of(node.all_input_nodes)))
    if packet in ATTENTIONS:  # of each thread, a block of scores and its part of the results
        query, key = list(tensors_of(node.all_input_nodes[:3]))[-3:-1]
        rows, columns = min(256, hint_of(query.shape[-2])), min(512, hint_of(key.shape[-2]))
        return torch.get_num_threads() * 4 * (2 * rows * columns + 3 * max(rows, columns) * hint_of(query.shape[-1]))
    return _by_itself(node, packet, graph) if graph.by_operator else 0  # compiled kernels convert element by element


def _by_itself(node: fx.Node, packet: object, graph: ComputeGraph) -> int:
    """Return the same of an operator that no compiler has fused with others."""
    inputs = list(tensors_of(node.all_input_nodes))
    if packet in DROPOUTS:  # the mask as numbers
        return graph.bytes_of_copy(inputs[0], inputs[0].dtype)
    if packet is aten.clone:
        return _block(inputs[0])
    strided = [value for value in inputs if packet in IN_ROWS and not _is_in_rows(value)]
    copied = sum(graph.bytes_of_copy(value, value.dtype) + _block(value) for value in strided)
    if packet is aten._safe_softmax:  # which scores are masked, and of which rows all
        rows = hinted_numel(inputs[0]) // max(1, hint_of(inputs[0].shape[node.args[1]]))  # type: ignore[index]
        return copied + graph.bytes_of_copy(inputs[0], torch.bool) + round_up(rows, graph.align)
    if packet is aten.where or is_cast(node) or not is_elementwise(node):
        return copied
    return _converted(inputs, node.meta.get("val"), graph)


def _converted(inputs: list[torch.Tensor], result: object, graph: ComputeGraph) -> int:
    """Return the bytes of inputs whose type is not the one that an element-wise operator computes in: it converts them first."""
    types = [value.dtype for value in inputs if value.ndim]
    if isinstance(result, torch.Tensor) and result.dtype != torch.bool:
        types.append(result.dtype)
    if not types:
        return 0
    computed = functools.reduce(torch.promote_types, types)
    return sum(graph.bytes_of_copy(value, computed) for value in inputs if value.ndim and value.dtype != computed)


def _block(value: torch.Tensor) -> int:
    """Return the bytes of the block by which PyTorch transposes a matrix that it copies."""
    is_transposed = value.ndim == 2 and hint_of(value.stride(0)) == 1 and hint_of(value.stride(1)) == hint_of(value.shape[0])
    return format_of(value.dtype).bytes(BLOCK) if is_transposed and hinted_numel(value) >= BLOCK else 0


def _is_in_rows(value: torch.Tensor) -> bool:
    expected = 1
    for size, stride in zip(map(hint_of, reversed(value.shape)), map(hint_of, reversed(value.stride())), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
