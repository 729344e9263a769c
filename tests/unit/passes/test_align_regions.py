from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, slot, text_of, unit
from torch import fx

from zinf_compile.passes.analysis.blocks import block_of, choose_regions
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.node_facts import mark_slot, parameters
from zinf_compile.passes.schedule.align_regions import align_regions
from zinf_compile.passes.verify import verify

UNIT = 64
"""Bytes of a 4x4 parameter."""
INPUTS = {"x": torch.empty(4, 4), "up": unit(4, 4), "down": unit(4, 4)}

TEXT = """
g = all_gather(up); v = wait(g); a = mm(x, v); release(v)
k = all_gather(down); u = wait(k); b = mm(a, u); release(u); c = relu(b)
return (c,)
"""


def named(gm: fx.GraphModule, **names: str) -> fx.GraphModule:
    for node, found in list(parameters(gm.graph)):
        mark_slot(node, dataclasses.replace(found, name=names.get(found.name, found.name)))
    return gm


def test_docstring_example() -> None:
    gm = named(graph_of(TEXT.replace(" c = relu(b)", "").replace("c,", "b,"), **INPUTS), up="h.0.up", down="h.0.down")
    before = text_of(gm).splitlines()[:-1]
    after = text_of(align_regions(gm, region_bytes=2 * UNIT)).splitlines()[:-1]
    shown_before, shown_after = example_of(align_regions)
    assert (shown_before, shown_after) == (before, after)


@pytest.mark.parametrize(("second", "limit"), [("h.1.down", 9 * UNIT), ("h.0.down", UNIT)])
def test_another_block_or_a_full_region_stays_apart(second: str, limit: int) -> None:
    gm = named(graph_of(TEXT, **INPUTS), up="h.0.up", down=second)
    before = lines_of(text_of(gm).replace("release(u)\nc = relu(b)", "c = relu(b)\nrelease(u)"))
    assert lines_of(text_of(align_regions(gm, region_bytes=limit))) == before


def test_reductions_wait_for_the_end_of_their_region() -> None:
    text = "g = all_gather(up); v = wait(g); a = mm(x, v); r = reduce_scatter(a, down); b = relu(a); release(v); return (r, b)"
    gm = align_regions(named(graph_of(text, **INPUTS), up="h.0.up", down="h.0.down"), region_bytes=9 * UNIT)
    assert text_of(gm).splitlines()[2:-1] == ["a = mm(x, v)", "b = relu(a)", "r = reduce_scatter(a, h.0.down)", "release(v)"]


def test_a_graph_without_transfers_is_unchanged() -> None:
    gm = graph_of("a = relu(x); return (a,)", x=torch.empty(4, 4))
    assert text_of(align_regions(gm, region_bytes=UNIT)) == "a = relu(x)\nreturn (a,)\n"


def test_legal_and_the_same_numbers() -> None:
    gm = named(graph_of(TEXT, **INPUTS), up="h.0.up", down="h.0.down")
    before = results(gm)
    verify(align_regions(gm, region_bytes=9 * UNIT))
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(before, results(gm), strict=True))


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("stages.1.blocks.12.norm.bias", "stages.1.blocks.12"),
        ("0.weight", "0"),
        ("wte.weight", ""),
        ("ln_1.weight", ""),
        ("conv2d.weight", ""),
    ],
)
def test_the_block_of_a_parameter(name: str, block: str) -> None:
    assert block_of(name) == block


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30), st.integers(1, 40))
def test_regions_cover_everything_and_keep_blocks_and_limit(drawn: list[tuple[int, int]], limit: int) -> None:
    units = [slot(i, f"h.{block}.w", size) for i, (block, size) in enumerate(drawn)]
    starts = choose_regions(units, region_bytes=limit)
    assert starts == sorted(set(starts))
    assert (starts[:1] == [0]) == bool(units)
    for start, end in itertools.pairwise([*starts, len(units)]):
        region = units[start:end]
        assert len({block_of(u.name) for u in region}) == 1
        assert len(region) == 1 or sum(u.bytes for u in region) <= limit


def test_equal_blocks_have_equal_regions() -> None:
    sizes = [3, 11, 5, 30, 7]
    units = [slot(0, "wte", 100), *(slot(1, f"h.{b}.{n}", n) for b in range(6) for n in sizes), slot(2, "head", 100)]
    starts = choose_regions(units, region_bytes=4 * 20)
    cuts = [[s - 1 - 5 * b for s in starts if 0 <= s - 1 - 5 * b < 5] for b in range(6)]
    assert cuts == [cuts[0]] * 6
    assert len(cuts[0]) > 1


TWICE = """
g = all_gather(up); v = wait(g); a = mm(x, v); p = relu(a)
k = all_gather(down); u = wait(k); b = mm(p, u); q = relu(b)
c = mm(q, v); r = relu(c)
d = mm(r, u); s = relu(d); release(v); release(u)
return (s,)
"""


def regions_of(gm: fx.GraphModule) -> list[list[str]]:
    return [[node.name for node in nodes] for nodes in Stretches(gm.graph).nodes]


def test_compute_that_comes_back_to_a_block_is_a_region_of_its_own() -> None:
    gm = align_regions(named(graph_of(TWICE, **INPUTS), up="h.0.up", down="h.1.up"), region_bytes=9 * UNIT)
    assert regions_of(gm) == [["a", "p"], ["b", "q"], ["c", "r"], ["d", "s"]]
    verify(gm)


def test_one_block_after_the_other_time() -> None:
    """Both units are of one block, which compute passes twice in a row."""
    gm = align_regions(named(graph_of(TWICE, **INPUTS), up="h.0.up", down="h.0.down"), region_bytes=9 * UNIT)
    assert regions_of(gm) == [["a", "p", "b", "q"], ["c", "r", "d", "s"]]


def test_a_unit_outside_of_blocks_that_is_read_again_cuts_nothing() -> None:
    """As tied embeddings: their second use is no other passage through a block."""
    text = TWICE.replace("d = mm(r, u)", "d = relu(r)")
    gm = align_regions(named(graph_of(text, **INPUTS), up="wte", down="h.1.up"), region_bytes=9 * UNIT)
    assert regions_of(gm) == [["a", "p"], ["b", "q", "c", "r", "d", "s"]]


def test_a_unit_that_one_block_reads_twice_in_a_row_cuts_nothing() -> None:
    text = "g = all_gather(up); v = wait(g); a = mm(x, v); b = mm(a, v); release(v); return (b,)"
    gm = align_regions(named(graph_of(text, **INPUTS), up="h.0.up"), region_bytes=9 * UNIT)
    assert regions_of(gm) == [["a", "b"]]


def test_a_backward_that_computes_its_block_itself_stays_one() -> None:
    """As a checkpoint does: the unit that is read first is also the one that is read last."""
    text = """
    g = all_gather(up); v = wait(g); a = mm(x, v)
    k = all_gather(down); u = wait(k); b = mm(a, u); c = mm(b, u); d = mm(c, v); e = relu(d); release(v); release(u)
    return (e,)
    """
    gm = align_regions(named(graph_of(text, **INPUTS), up="h.0.up", down="h.0.down"), region_bytes=9 * UNIT)
    assert regions_of(gm) == [["a", "b", "c", "d", "e"]]
