from __future__ import annotations

import torch
from irtext import example_of, graph_of, lines_of, results, text_of

from zinf_compile.passes.activations.raise_saved_views import raise_saved_views

INPUTS = {"x": torch.empty(4, 4), "y": torch.empty(4, 4)}


def test_docstring_example() -> None:
    before, after = example_of(raise_saved_views)
    text = "a = relu(x); b = mm(a, y); d = detach(a); return (b, a, d)"
    assert before == lines_of(text)
    gm = graph_of(text, **INPUTS)
    expected = results(gm)
    assert text_of(raise_saved_views(gm, own_outputs=1)).splitlines() == after
    assert all(map(torch.equal, results(gm), expected))


def test_views_of_views_and_what_compute_or_the_user_reads() -> None:
    """A chain comes up whole; a view that a product reads, one of an input, and one that the user gets stay."""
    text = """
    a = relu(x); b = mm(a, y); c = detach(a); d = t(c); e = t(b); f = mm(e, y)
    g = detach(x); h = detach(b); return (h, f, d, g, e)
    """
    gm = raise_saved_views(graph_of(text, **INPUTS), own_outputs=1)
    gm.graph.lint()
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["a", "c", "d", "b", "e", "f", "g", "h"]
