"""Twice the graph costs each pass twice the work: counted in lines that run, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from irtext import graph_of, unit
from torch import fx

from zinf_compile.passes import graph_passes, pass_name, verify
from zinf_compile.passes.analysis.transfer_graph import build_transfer_graph, transfer_dot
from zinf_compile.passes.joint.recompute_unit_views import recompute_unit_views
from zinf_compile.passes.lower import lower

SIZE = 40


def layers(n: int) -> str:
    """A weight and a gradient for each layer."""
    text = "".join(f"t{i} = t(w{i})\na{i + 1} = mm(a{i}, t{i})\n" for i in range(n))
    reductions = "".join(f"r{i} = reduce_scatter(a{i + 1}, w{i})\n" for i in range(n))
    return f"{text}{reductions}return ({', '.join(f'r{i}, a{i}' for i in range(n))})"


def one_weight(n: int) -> str:
    """One weight read by all layers, in a view of its own for each."""
    return "".join(f"t{i} = t(w0)\na{i + 1} = mm(a{i}, t{i})\n" for i in range(n)) + f"return (a{n},)"


def cast(n: int) -> str:
    """A weight for each layer, and one that all read, in a narrower type."""
    text = "".join(
        f"c{i} = _to_copy(w{i}, dtype=torch.float32)\nt{i} = t(c{i})\nd{i} = _to_copy(w0, dtype=torch.float32)\n"
        f"b{i} = mm(a{i}, t{i})\na{i + 1} = mm(b{i}, d{i})\n"
        for i in range(n)
    )
    return f"{text}return (a{n},)"


def two_weights_in_turn(n: int) -> str:
    """Weights that come again, all layers long."""
    return "".join(f"a{i + 1} = mm(a{i}, w{i % 2})\n" for i in range(n)) + f"return (a{n},)"


def each_weight_twice(n: int) -> str:
    """Weights that are released before they come again, and a large one that makes room to hold them all."""
    return "".join(f"a{i + 1} = mm(a{i}, w{i % (n // 2)})\n" for i in range(n)) + f"c = mm(a{n}, head)\nreturn (c,)"


def parts_of_one_gradient(n: int) -> str:
    """Gradients that are slices of one value."""
    text = "".join(f"p{i} = view(a0, [1, 4, 4])\ns{i} = select(q, 0, 0)\nr{i} = reduce_scatter(s{i}, w{i})\n" for i in range(n))
    return (
        f"q = mul(a0, a0)\n{text.replace('select(q, 0, 0)', 'view(q, [4, 4])')}return ({', '.join(f'r{i}' for i in range(n))},)"
    )


def returned(n: int) -> str:
    """Views of all weights that leave the graph."""
    return "".join(f"t{i} = t(w{i})\n" for i in range(n)) + f"return ({', '.join(f't{i}' for i in range(n))},)"


def all_at_once(n: int) -> str:
    """One operator that reads all weights."""
    return f"c = cat([{', '.join(f'w{i}' for i in range(n))}])\nreturn (c,)"


SHAPES = [all_at_once, cast, layers, one_weight, two_weights_in_turn, each_weight_twice, parts_of_one_gradient, returned]


def look(gm: fx.GraphModule) -> str:
    """Find the critical path, and draw it."""
    return transfer_dot([("", build_transfer_graph(gm.graph, world_size=2))])


STEPS: list[Callable[[fx.GraphModule], Any]] = [
    *graph_passes(bucket_bytes=256),
    partial(verify, limit_bytes=2**30),
    partial(lower, name="test"),
    look,
]


def lines_run(function: Callable[[], Any]) -> int:
    """Count the lines of Python that a call runs in the passes, in FX and in networkx: each turn of a loop is one at least."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            file = frame.f_code.co_filename
            if not any(part in file for part in ("passes", "/fx/", "/networkx/")):
                return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def work(shape: Callable[[int], str], n: int) -> dict[str, int]:
    """Return the lines that each pass runs on a graph of n layers."""
    dtype = torch.float64 if shape is cast else torch.float32
    weights = {f"w{i}": unit(4, 4, dtype=dtype) for i in range(n)}
    gm = graph_of(shape(n), a0=torch.empty(4, 4), **weights, head=unit(4, 4 * n))
    steps = [recompute_unit_views, *STEPS]
    return {pass_name(step): lines_run(partial(step, gm)) for step in steps}


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_layers_is_twice_the_work(shape: Callable[[int], str]) -> None:
    once, twice = work(shape, SIZE), work(shape, 2 * SIZE)
    growth = {name: twice[name] / once[name] for name in once}
    assert max(growth.values()) < 2.2, growth
