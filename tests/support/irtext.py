"""Graphs from text and from modules, and back to text: what the tests of the passes read and compare."""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiling import choose_tiles
from zinf_compile.passes.analysis.print_graph import graph_text
from zinf_compile.passes.graph.node_facts import mark_slot, mark_tile, parameters

_SCHEDULE = {op._schema.name.split("::")[1]: op for op in (*SCHEDULE_OPS, ops.tile, ops.join_tiles)}


def slot(index: int, name: str, *shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> ParameterSlot:
    """Describe a parameter."""
    stride, cpu = torch.empty(shape).stride(), torch.device("cpu")
    return ParameterSlot(index=index, name=name, shape=shape, stride=stride, dtype=dtype, device=cpu, requires_grad=trained)


def unit(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Stand for an input of `graph_of` that is a parameter."""
    return nn.Parameter(torch.empty(shape, dtype=dtype))


def graph_of(text: str, **inputs: torch.Tensor) -> fx.GraphModule:
    """Build the graph that `text` shows: statements such as `t = t(w)`, `release(v)`, `a = s[0]`, `return (a, b)`.

    `inputs` are its placeholders, in order; parameters among them are its slots.
    """
    graph, fake, nodes = fx.Graph(), FakeTensorMode(), {}
    for index, (name, value) in enumerate(inputs.items()):
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = fake.from_tensor(value.detach())
        if isinstance(value, nn.Parameter):
            mark_slot(nodes[name], slot(index, name, *value.shape, dtype=value.dtype, trained=value.requires_grad))

    def call(name: str, target: Callable[..., Any], arguments: list[ast.expr], keywords: list[ast.keyword]) -> fx.Node:
        args, kwargs = tuple(map(value_of, arguments)), {str(k.arg): value_of(k.value) for k in keywords}
        node = graph.create_node("call_function", target, args, kwargs, name=name or None)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake:
            node.meta["val"] = target(*args, **kwargs)
        return node

    def value_of(expression: ast.expr, name: str = "") -> Any:
        match expression:
            case ast.Call(ast.Name(function), arguments, keywords):
                return call(name, _operator(function), arguments, keywords)
            case ast.Subscript(source, index):
                return call(name, operator.getitem, [source, index], [])
            case ast.Name(known):
                return nodes[known]
            case ast.Tuple(items):
                return tuple(map(value_of, items))
            case ast.List(items):
                return list(map(value_of, items))
        return eval(ast.unparse(expression), {"torch": torch})

    returned: Any = ()
    for line in lines_of(text):
        name, _, right = line.rpartition(" = ") if "=" in line.split("(")[0] else ("", "", line)
        value = value_of(ast.parse(right.removeprefix("return "), mode="eval").body, name)
        if right.startswith("return "):
            returned = value
        elif name:
            nodes[name] = value
    graph.output(returned)
    return _LazyGraphModule(nn.Module(), graph)  # whose code is written once somebody calls it


def cut(gm: fx.GraphModule, tile_bytes: int) -> fx.GraphModule:
    """Say that the parameters are cut into tiles."""
    for node, found in list(parameters(gm.graph)):
        tiles = choose_tiles(found.shape, found.stride, format_of(found.dtype), limit_bytes=tile_bytes, world_size=1)
        mark_slot(node, dataclasses.replace(found, tiles=tiles))
    return gm


def each_a_tile(gm: fx.GraphModule) -> fx.GraphModule:
    """Say that the parameters are tiles, of one of which nothing else is known."""
    for number, (node, found) in enumerate(list(parameters(gm.graph))):
        mark_tile(node, node, dataclasses.replace(found, tile=number))
    return gm


def text_of(gm: fx.GraphModule, **renamed: str) -> str:
    """Print the graph, one operator a line, with nodes renamed for the reader; `return ()` is left out."""
    for node in gm.graph.nodes:
        if node.name in renamed:
            node.name = renamed[node.name]
    return graph_text(gm).removesuffix("return ()\n")


def lines_of(text: str) -> list[str]:
    """Split at line ends and semicolons."""
    return [line.strip() for line in re.split(r"[;\n]", text) if line.strip()]


def example_of(step: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Return the graph before and after that the pass's docstring shows."""
    match = re.search(r"before:(.*?)after:(.*?)\n\n", step.__doc__ or "", re.DOTALL)
    assert match, f"the docstring of {step.__name__} shows no rewrite"
    return lines_of(match[1]), lines_of(match[2])


def results(gm: fx.GraphModule) -> list[Any]:
    """Run the graph as it stands on random numbers, the same at each call."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for each kind of device that isn't there
    inputs = [_random(node.meta["val"]) for node in gm.graph.nodes if node.op == "placeholder"]
    outputs = fx.Interpreter(gm).run(*inputs, enable_io_processing=False)
    return [*outputs, *inputs]  # inputs too: a graph may write to a buffer


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph as other nodes."""
    graph, nodes = fx.Graph(), {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    return _LazyGraphModule(gm, graph)


def _operator(name: str) -> Callable[..., Any]:
    if name in _SCHEDULE:
        return _SCHEDULE[name]
    packet = getattr(torch.ops.aten if hasattr(torch.ops.aten, name) else torch.ops.prims, name)
    overloads = [getattr(packet, o) for o in ("Tensor", "int", "dim_IntList", "default") if o in packet.overloads()]
    return next(o for o in overloads if "Tensor" in str(o._schema.arguments[0].type))  # `mul.int` is of two integers


def _random(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, torch.SymInt) else value
    if value.dtype == torch.uint8:
        return torch.get_rng_state()  # what a checkpointed dropout hands to its backward
    shape, stride = ([s.node.hint if isinstance(s, torch.SymInt) else s for s in t] for t in (value.shape, value.stride()))
    filled = torch.empty_strided(shape, stride, dtype=value.dtype)
    return filled.normal_() if filled.is_floating_point() else filled.random_(0, 2)
