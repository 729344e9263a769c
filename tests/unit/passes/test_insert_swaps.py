from __future__ import annotations

import pytest
import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx

from zinf_compile.passes.schedule.insert_swaps import insert_swaps
from zinf_compile.passes.verify import verify

INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "u": unit(4, 4)}
ONE_HOP, TWO_HOPS = ("nvme", "device"), ("nvme", "host", "device")

BEFORE = """
g = all_gather(w, 0)
v = wait(g)
a = mm(x, v)
release(v)
r = reduce_scatter(a, w)
return (r,)
"""
AFTER = """
s = swap_in(w, "nvme", "host", 0)
t = swap_in(s, "host", "device", 0)
g = all_gather(t, 0)
v = wait(g)
a = mm(x, v)
release(v)
r = reduce_scatter(a, w)
o = swap_out(r, "device", "host")
q = swap_out(o, "host", "nvme")
return (q,)
"""
TWO_TYPES = """
g = all_gather(w, 0)
h = all_gather(u, 1, dtype=torch.bfloat16)
v = wait(g)
f = wait(h)
a = mul(v, f)
release(v)
release(f)
"""


def swapped(text: str, *, params: tuple[str, ...] = (), grads: tuple[str, ...] = (), **inputs: torch.Tensor) -> fx.GraphModule:
    return verify(insert_swaps(graph_of(text, **(inputs or INPUTS)), params=params, grads=grads))


def test_docstring_example() -> None:
    gm = swapped(BEFORE, params=TWO_HOPS, grads=TWO_HOPS[::-1])
    assert text_of(gm, read="s", copied="t", offloaded="o", offloaded_1="q") == AFTER.lstrip()
    assert example_of(insert_swaps) == (lines_of(BEFORE), lines_of(AFTER))


def test_rows_come_from_the_first_tier() -> None:
    inputs = {"w": unit(4, 4), "i": torch.zeros(3, dtype=torch.int64)}
    for params in (TWO_HOPS, ONE_HOP, ("host", "device")):
        assert text_of(swapped("r = gather_rows(w, i); return (r,)", params=params, **inputs)).splitlines() == [
            f'r = gather_rows(w, i, "{params[0]}")',
            "return (r,)",
        ]
    assert "(w, i)" in text_of(swapped("r = gather_rows(w, i); return (r,)", **inputs))


def test_where_the_device_is_host_memory_there_is_one_hop() -> None:
    lines = text_of(swapped(BEFORE, params=ONE_HOP, grads=ONE_HOP[::-1])).splitlines()
    assert lines[:2] == ['read = swap_in(w, "nvme", "device", 0)', "g = all_gather(read, 0)"]
    assert lines[-2:] == ['offloaded = swap_out(r, "device", "nvme")', "return (offloaded,)"]


def test_parameters_on_the_host_are_copied() -> None:
    text = text_of(swapped(BEFORE, params=("host", "device")))
    assert text.startswith('copied = swap_in(w, "host", "device", 0)\ng = all_gather(copied, 0)\n')
    assert "swap_out" not in text


def test_members_of_a_group_move_together_hop_by_hop() -> None:
    text = "g = all_gather(w, 3); h = all_gather(u, 3); v = wait(g); f = wait(h); release(v); release(f)"
    assert text_of(swapped(text, params=TWO_HOPS)).splitlines()[:6] == [
        'read = swap_in(w, "nvme", "host", 3)',
        'read_1 = swap_in(u, "nvme", "host", 3)',
        'copied = swap_in(read, "host", "device", 3)',
        'copied_1 = swap_in(read_1, "host", "device", 3)',
        "g = all_gather(copied, 3)",
        "h = all_gather(copied_1, 3)",
    ]


def test_groups_of_two_data_types_that_stand_together_stay_so() -> None:
    assert text_of(swapped(TWO_TYPES, params=ONE_HOP)).splitlines()[:4] == [
        'read = swap_in(w, "nvme", "device", 0)',
        'read_1 = swap_in(u, "nvme", "device", 1)',
        "g = all_gather(read, 0)",
        "h = all_gather(read_1, 1, dtype=torch.bfloat16)",
    ]


def test_a_unit_gathered_twice_is_brought_twice() -> None:
    text = "g = all_gather(w, 0); v = wait(g); a = mm(x, v); release(v); h = all_gather(w, 1); f = wait(h); release(f)"
    assert text_of(swapped(text, params=ONE_HOP)).count("swap_in(w, ") == 2


def test_gradients_leave_behind_the_last_of_their_group() -> None:
    text = """
        a = relu(x)
        r = reduce_scatter(a, w, 0)
        s = reduce_scatter(x, u, 0)
        q = reduce_scatter(x, e, 1)
        return (s, r, q)
    """
    gm = swapped(text, grads=TWO_HOPS[::-1], **INPUTS, e=unit(4, 4))
    assert text_of(gm).splitlines()[1:] == [
        "r = reduce_scatter(a, w, 0)",
        "s = reduce_scatter(x, u, 0)",
        'offloaded = swap_out(r, "device", "host")',
        'offloaded_1 = swap_out(offloaded, "host", "nvme")',
        'offloaded_2 = swap_out(s, "device", "host")',
        'offloaded_3 = swap_out(offloaded_2, "host", "nvme")',
        "q = reduce_scatter(x, e, 1)",
        'offloaded_4 = swap_out(q, "device", "host")',
        'offloaded_5 = swap_out(offloaded_4, "host", "nvme")',
        "return (offloaded_3, offloaded_1, offloaded_5)",
    ]


def test_lone_gradients_leave_one_by_one() -> None:
    text = "r = reduce_scatter(x, w); s = reduce_scatter(x, u); return (r, s)"
    assert [line[:5] for line in text_of(swapped(text, grads=("device", "host"))).splitlines()] == [
        "r = r", "offlo", "s = r", "offlo", "retur",
    ]  # fmt: skip


def test_units_without_dimensions_or_elements_stay_on_the_device() -> None:
    text = """
        g = all_gather(w, 0)
        h = all_gather(scale, 0)
        k = all_gather(none, 0)
        v = wait(g)
        f = wait(h)
        z = wait(k)
        a = mul(v, f)
        release(v)
        release(f)
        release(z)
        r = reduce_scatter(scale_grad, scale)
        return (r, a)
    """
    inputs = {"w": unit(4, 4), "scale": unit(), "none": unit(0, 3), "scale_grad": torch.empty(())}
    lines = text_of(swapped(text, params=ONE_HOP, grads=ONE_HOP[::-1], **inputs)).splitlines()
    assert lines[:4] == [
        'read = swap_in(w, "nvme", "device", 0)',
        "g = all_gather(read, 0)",
        "h = all_gather(scale, 0)",
        "k = all_gather(none, 0)",
    ]
    assert lines[-1] == "return (r, a)"


@pytest.mark.parametrize("text", [BEFORE, TWO_TYPES, "a = relu(x); return (a,)"])
def test_where_all_is_on_the_device_the_graph_is_unchanged(text: str) -> None:
    before = text_of(graph_of(text, **INPUTS))
    assert text_of(swapped(text)) == before
    assert text_of(swapped(text, params=("device",), grads=("device",))) == before


@pytest.mark.parametrize("tiers", [ONE_HOP, TWO_HOPS, ("host", "device")])
def test_numbers_stay(tiers: tuple[str, ...]) -> None:
    gm = graph_of(BEFORE.replace("return (r,)", "return (r, a)"), **INPUTS)
    before = results(gm)
    verify(insert_swaps(gm, params=tiers, grads=tiers[::-1]))
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)
