from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from irtext import graph_of, text_of, unit

from zinf_compile.errors import IllegalGraphError
from zinf_compile.passes import verify as verify_module
from zinf_compile.passes.verify import peak_gathered_bytes, verify

UNIT = 64
"""Bytes of a 4x4 parameter."""
INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "u": unit(4, 4)}

LEGAL = """
g = all_gather(w, 0)
h = all_gather(u, 0)
v = wait(g)
t = t(v)
a = mm(x, t)
release(v)
f = wait(h)
b = mm(a, f)
release(f)
n = sym_size(w, 0)
r = reduce_scatter(b, w, 0)
s = reduce_scatter(a, u, 0)
j = argmax(a, 1)
k = gather_rows(w, j, "nvme")
i = all_gather(w, 1)
z = wait(i)
c = mm(b, z)
release(z)
return (c, w, r, s)
"""

SWAPPED = """
p = swap_in(w, "nvme", "host", 0)
q = swap_in(u, "nvme", "host", 0)
c = swap_in(p, "host", "device", 0)
d = swap_in(q, "host", "device", 0)
g = all_gather(c, 0)
h = all_gather(d, 0)
v = wait(g)
a = mm(x, v)
release(v)
f = wait(h)
b = mm(a, f)
release(f)
r = reduce_scatter(b, w, 0)
s = reduce_scatter(a, u, 0)
o = swap_out(r, "device", "host")
l = swap_out(o, "host", "nvme")
m = swap_out(s, "device", "nvme")
return (l, m)
"""

ILLEGAL = {
    "compute reads a hollow parameter": ("a = mm(x, w)", "a reads the hollow parameter w"),
    "compute reads a view of a hollow parameter": ("t = t(w); a = mm(x, t)", "t reads the hollow parameter w"),
    "a reduction takes a hollow parameter for a gradient": ("r = reduce_scatter(w, u)", "r reads the hollow parameter w"),
    "a gather of something else": ("g = all_gather(x); v = wait(g); release(v)", "g gathers x, which is not a parameter"),
    "rows of something else": ("i = argmax(x, 1); r = gather_rows(x, i)", "r looks rows up in x, which is not a parameter"),
    "a handle nobody waits for": ("g = all_gather(w)", "the handle g must be used by one wait alone, found: nothing"),
    "a handle used by compute": (
        "g = all_gather(w); v = wait(g); a = mm(x, g); release(v)",
        "the handle g must be used by one wait alone, found: v, a",
    ),
    "a handle waited for twice": (
        "g = all_gather(w); v = wait(g); z = wait(g); release(v); release(z)",
        "the handle g must be used by one wait alone, found: v, z",
    ),
    "a wait for no handle": ("v = wait(w); release(v)", "v waits for w, which no all_gather started"),
    "a unit never released": ("g = all_gather(w); v = wait(g); a = mm(x, v)", "v is never released"),
    "a unit released twice": ("g = all_gather(w); v = wait(g); release(v); release(v)", "v is released 2 times"),
    "a release of something else": ("a = relu(x); release(a)", "release_default releases a, which is not the result of a wait"),
    "a release of a view": (
        "g = all_gather(w); v = wait(g); t = t(v); release(t)",
        "release_default releases t, which is not the result of a wait",
    ),
    "a use after the release": (
        "g = all_gather(w); v = wait(g); release(v); a = mm(x, v)",
        "a uses v after release_default released its memory",
    ),
    "a view used after the release": (
        "g = all_gather(w); v = wait(g); s = split(v, 2); p = s[0]; release(v); a = relu(p)",
        "a uses p after release_default released its memory",
    ),
    "a hidden view used after the release": (
        "g = all_gather(w); v = wait(g); p = _unsafe_view(v, [16]); release(v); a = relu(p)",
        "a uses p after release_default released its memory",
    ),
    "a unit that leaves the graph": (
        "g = all_gather(w); v = wait(g); release(v); return (v,)",
        "v shares memory with v and leaves the graph",
    ),
    "a view of a unit that leaves the graph": (
        "g = all_gather(w); v = wait(g); t = t(v); release(v); return (t,)",
        "t shares memory with v and leaves the graph",
    ),
    "a reduction onto something else": ("r = reduce_scatter(x, x)", "r reduces onto x, which is not a parameter"),
    "a reduced gradient read by compute": (
        "r = reduce_scatter(x, w); a = relu(r)",
        "a reads r, a reduced gradient, which may only leave the graph",
    ),
    "a group torn apart": (
        "g = all_gather(w, 0); v = wait(g); h = all_gather(u, 0); f = wait(h); release(v); release(f)",
        "h isn't adjacent to the others of its group 0",
    ),
    "reductions of one group torn apart": (
        "r = reduce_scatter(x, w, 0); a = relu(x); s = reduce_scatter(a, u, 0)",
        "s isn't adjacent to the others of its group 0",
    ),
    "a group of two types": (
        "g = all_gather(w, 0); h = all_gather(u, 0, dtype=torch.bfloat16); v = wait(g); f = wait(h); release(v); release(f)",
        "h is of torch.bfloat16, others of its group 0 aren't",
    ),
    "a gather in a wider type": (
        "g = all_gather(w, dtype=torch.float64); v = wait(g); release(v)",
        "g gathers w in torch.float64, which is no narrower form of its torch.float32",
    ),
    "a gather as integers": (
        "g = all_gather(w, dtype=torch.int16); v = wait(g); release(v)",
        "g gathers w in torch.int16, which is no narrower form of its torch.float32",
    ),
    "a group taken up again": (
        "g = all_gather(w, 0); h = all_gather(u, 1); i = all_gather(w, 0); "
        "v = wait(g); f = wait(h); z = wait(i); release(v); release(f); release(z)",
        "i belongs to group 0, which was already issued",
    ),
    "something else swapped in": (
        's = swap_in(x, "nvme", "device"); g = all_gather(s); v = wait(g); release(v)',
        "s swaps x in, which is not a parameter",
    ),
    "a gradient swapped in": (
        'r = reduce_scatter(x, w); s = swap_in(r, "host", "device"); g = all_gather(s); v = wait(g); release(v)',
        "s swaps r in, which is not a parameter",
    ),
    "a swap in that leads further from the device": (
        's = swap_in(w, "device", "host"); t = swap_in(s, "host", "device"); g = all_gather(t); v = wait(g); release(v)',
        "s moves from device to host, which is no nearer to the device",
    ),
    "a swap in that stays where it is": (
        's = swap_in(w, "device", "device"); g = all_gather(s); v = wait(g); release(v)',
        "s moves from device to device, which is no nearer to the device",
    ),
    "a gap between two swaps": (
        's = swap_in(w, "nvme", "host"); t = swap_in(s, "nvme", "device"); g = all_gather(t); v = wait(g); release(v)',
        "t moves s from nvme, but it is on host",
    ),
    "a gather of what isn't on the device": (
        's = swap_in(w, "nvme", "host"); g = all_gather(s); v = wait(g); release(v)',
        "g gathers s, which is on host, not on the device",
    ),
    "a swap nobody takes": (
        's = swap_in(w, "nvme", "device")',
        "the handle s must be used by one swap_in or all_gather alone, found: nothing",
    ),
    "a swap gathered twice": (
        's = swap_in(w, "nvme", "device"); g = all_gather(s); h = all_gather(s); v = wait(g); f = wait(h); release(v)'
        "; release(f)",
        "the handle s must be used by one swap_in or all_gather alone, found: g, h",
    ),
    "a swapped shard read by compute": (
        's = swap_in(w, "nvme", "device"); a = relu(s)',
        "the handle s must be used by one swap_in or all_gather alone, found: a",
    ),
    "something else swapped out": (
        'o = swap_out(x, "device", "host"); return (o,)',
        "o swaps x out, which is not a reduced gradient",
    ),
    "a swap out that leads nearer": (
        'r = reduce_scatter(x, w); o = swap_out(r, "host", "device"); return (o,)',
        "o moves from host to device, which is no further from the device",
    ),
    "a swap out from where the gradient isn't": (
        'r = reduce_scatter(x, w); o = swap_out(r, "host", "nvme"); return (o,)',
        "o moves r from host, but it is on device",
    ),
    "a gap between two swaps out": (
        'r = reduce_scatter(x, w); o = swap_out(r, "device", "nvme"); q = swap_out(o, "host", "nvme"); return (q,)',
        "q moves o from host, but it is on nvme",
    ),
    "a gradient that leaves and is swapped out": (
        'r = reduce_scatter(x, w); o = swap_out(r, "device", "host"); return (r, o)',
        "r is swapped out and used besides",
    ),
    "a gradient swapped out twice": (
        'r = reduce_scatter(x, w); o = swap_out(r, "device", "host"); q = swap_out(r, "device", "nvme"); return (o, q)',
        "r is swapped out and used besides",
    ),
    "an offloaded gradient read by compute": (
        'r = reduce_scatter(x, w); o = swap_out(r, "device", "host"); a = relu(o); return (a,)',
        "a reads o, a reduced gradient, which may only leave the graph",
    ),
    "swaps of one group torn apart": (
        's = swap_in(w, "nvme", "device", 0); a = relu(x); t = swap_in(u, "nvme", "device", 0)\n'
        "g = all_gather(s, 0); h = all_gather(t, 0); v = wait(g); f = wait(h); release(v); release(f)",
        "t isn't adjacent to the others of its group 0",
    ),
}


def test_a_legal_schedule_passes_and_comes_back() -> None:
    gm = graph_of(LEGAL, **INPUTS)
    assert verify(gm, limit_bytes=2 * UNIT) is gm
    assert text_of(gm) == LEGAL.lstrip()


def test_a_legal_schedule_with_swaps_passes_and_comes_back() -> None:
    gm = graph_of(SWAPPED, **INPUTS)
    assert verify(gm, limit_bytes=2 * UNIT) is gm
    assert text_of(gm) == SWAPPED.lstrip()


@pytest.mark.parametrize("rule", ILLEGAL)
def test_each_broken_rule_is_named(rule: str) -> None:
    text, message = ILLEGAL[rule]
    with pytest.raises(IllegalGraphError) as caught:
        verify(graph_of(text, **INPUTS))
    assert message in str(caught.value).split("\n  ")


def test_all_broken_rules_are_named_at_once() -> None:
    with pytest.raises(IllegalGraphError, match=r"a reads the hollow parameter w\n  b reads the hollow parameter u"):
        verify(graph_of("a = mm(x, w); b = mm(x, u)", **INPUTS))


def test_between_passes_units_may_be_hollow_or_unreleased_but_not_more() -> None:
    gm = graph_of("g = all_gather(w); v = wait(g); a = mm(x, v); b = mm(a, u)", **INPUTS)
    assert verify(gm, complete=False) is gm
    with pytest.raises(IllegalGraphError, match="released 2 times"):
        verify(graph_of("g = all_gather(w); v = wait(g); release(v); release(v)", **INPUTS), complete=False)


def test_the_limit_holds_from_the_start_of_a_gather_to_its_release() -> None:
    text = "g = all_gather(w); v = wait(g); h = all_gather(u); release(v); f = wait(h); release(f)"
    gm = graph_of(text, **INPUTS)
    assert peak_gathered_bytes(gm.graph) == (2 * UNIT, "h")
    with pytest.raises(IllegalGraphError, match="128 bytes are gathered at h, more than the 127 allowed"):
        verify(gm, limit_bytes=2 * UNIT - 1)


def test_what_is_swapped_in_counts_from_the_hop_that_ends_on_the_device() -> None:
    text = """
        s = swap_in(w, "nvme", "host"); p = swap_in(u, "nvme", "host"); c = swap_in(s, "host", "device"); g = all_gather(c)
        v = wait(g); d = swap_in(p, "host", "device"); release(v); h = all_gather(d); f = wait(h); release(f)
    """
    assert peak_gathered_bytes(graph_of(text, **INPUTS).graph) == (2 * UNIT, "d")
    text = """
        s = swap_in(w, "nvme", "device"); p = swap_in(u, "nvme", "device"); g = all_gather(s, dtype=torch.bfloat16); v = wait(g)
        release(v); h = all_gather(p); f = wait(h); release(f)
    """
    gm = graph_of(text, **INPUTS)
    assert peak_gathered_bytes(gm.graph) == (2 * UNIT, "p"), "a shard arrives in the unit's own type"
    with pytest.raises(IllegalGraphError, match="128 bytes are gathered at p, more than the 127 allowed"):
        verify(gm, limit_bytes=2 * UNIT - 1)


def test_what_travels_narrow_is_held_narrow() -> None:
    text = "g = all_gather(w, dtype=torch.bfloat16); v = wait(g); h = all_gather(u); release(v); f = wait(h); release(f)"
    gm = graph_of(text, **INPUTS)
    assert verify(gm, limit_bytes=3 * UNIT // 2) is gm
    assert peak_gathered_bytes(gm.graph) == (3 * UNIT // 2, "h")


def test_it_shares_no_code_with_what_makes_schedules() -> None:
    tree = ast.parse(Path(verify_module.__code__.co_filename).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {"errors", "ir", "ir.formats", "ir.op_spec", "ir.tiers"}
    ours |= {f"passes.graph.{name}" for name in ("alias", "node_facts", "remade")}
    assert imported == {"__future__", "collections.abc", "torch", *(f"zinf_compile.{module}" for module in ours)}
