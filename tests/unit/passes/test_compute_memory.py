"""The account of compute's memory: what each value takes, and one graph that moves all as the account of any part of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from irtext import each_a_tile, graph_of, unit
from torch import fx

from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes import as_performed
from zinf_compile.passes.analysis.compute_choices import ChoiceAccounts
from zinf_compile.passes.analysis.compute_graph import ComputeGraph
from zinf_compile.passes.analysis.compute_memory import account_compute
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.analysis.saved_time import kinds_of, seconds_away
from zinf_compile.passes.graph.node_facts import mark_moving
from zinf_compile.plan.compute_memory import ComputeMemory

VALUE = 4 * 16 * 16
"""Bytes of each value here."""

UNITS = {name: unit(16, 16) for name in ("w", "u", "z")}
INPUTS = {"x": torch.empty(16, 16), **UNITS}
BACKWARD_INPUTS = {**{name: torch.empty(16, 16) for name in ("r", "t", "e", "y", "n")}, **UNITS}

FORWARD = """
g = all_gather(w); v = wait(g); a = mm(x, v); r = relu(a); t = t(r); release(v)
h = all_gather(u); f = wait(h); b = mm(r, f); e = exp(b); release(f)
k = all_gather(z); q = wait(k); c = mm(e, q); y = sin(c); d = mm(y, q); release(q); return (d, r, t, e, y)
"""
BACKWARD = """
k = all_gather(z); q = wait(k); a = mm(n, q); b = mul(a, y); release(q)
h = all_gather(u); f = wait(h); c = mm(b, f); d = mul(c, e); release(f)
g = all_gather(w); v = wait(g); i = mm(d, v); j = mul(i, r); o = mm(j, t); release(v); return (o, j)
"""


def pair() -> tuple[fx.GraphModule, fx.GraphModule]:
    return graph_of(FORWARD, **INPUTS), graph_of(BACKWARD, **BACKWARD_INPUTS)


def measured(
    moving: tuple[str, ...], stays: tuple[str, ...] = (), *, apart: bool = False, by_operator: bool = True
) -> list[ComputeMemory]:
    """Return the accounts of forward and backward with some values moving, all of them marked but `stays` counted as staying."""
    forward, backward = pair()
    found = find_memories(forward.graph, backward.graph, own_outputs=1)
    topology = Topology(host_apart=apart)
    marked = tuple(dataclasses.replace(each, tier=Tier.NVME) for each in found if each.name in (*moving, *stays))
    mark_moving(forward, backward, marked)
    names = frozenset(name for each in found if each.name in stays for name in each.inputs)
    graphs = [
        ComputeGraph(as_performed(each.graph, hops=topology.hops), torch.device("cpu"), by_operator=by_operator)
        for each in (forward, backward)
    ]
    ahead = account_compute(graphs[0], results=1, stays=names)
    back = account_compute(graphs[1], forward=ahead.handed, stays=names)
    return [ahead.memory(), back.memory()]


def test_what_is_kept_and_what_moves() -> None:
    forward, backward = measured(())
    assert (forward.saved, forward.results) == (4 * VALUE, VALUE), "a view takes nothing; the result is the caller's"
    assert forward.peak == 6 * VALUE, "x, r, e, y, d, and the result of the call before"
    assert backward.peak == 7 * VALUE, "n, r, e, y, and the forward's result and input, which the caller has; a product"
    forward, backward = measured(("r", "e", "y"))
    assert (forward.saved, forward.results) == (VALUE, VALUE)
    assert forward.peak == 6 * VALUE, "none has left before the last of three stretches"
    assert backward.peak == 6 * VALUE, "r alone is away during the first one of the backward; its view comes back with it"


@pytest.mark.parametrize(("apart", "by_operator"), list(itertools.product([False, True], repeat=2)))
def test_one_graph_shows_what_each_choice_takes(apart: bool, by_operator: bool) -> None:
    names = ("r", "e", "y")
    for moving in itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(4)):
        stays = tuple(name for name in names if name not in moving)
        how = {"apart": apart, "by_operator": by_operator}
        assert measured(moving, stays, **how) == measured(moving, **how), moving


def test_seconds_away_and_kinds() -> None:
    """A product takes 2 * 16**3 operations, a value passes memory once; what is back as soon as it left has no time away."""
    forward, backward = pair()
    found = find_memories(forward.graph, backward.graph, own_outputs=1)
    kinds = kinds_of(forward.graph, found)
    assert len(set(kinds.values())) == 3
    mark_moving(forward, backward, tuple(dataclasses.replace(each, tier=Tier.NVME) for each in found))
    graphs = [as_performed(gm.graph, hops=Topology(host_apart=False).hops) for gm in (forward, backward)]
    rates: Any = {"flops_per_second": lambda dtype: 2.0 * 16**3, "bytes_per_second": float(VALUE)}
    away = seconds_away(*graphs, found, **rates)
    assert away == {"r": 2.0}, "while the first stretch of the backward runs: one product and one pass"
    assert seconds_away(*graphs, found, **rates, others=1.0) == {"r": 16.0, "e": 14.0, "y": 14.0}, "and two graphs more"


REDUCING = """
k = all_gather(z); q = wait(k); a = mm(n, q); b = mm(a, y); s = reduce_scatter(b, z); release(q)
h = all_gather(u); f = wait(h); c = mm(a, f); d = mm(c, e); v = reduce_scatter(d, u); release(f)
g = all_gather(w); o = wait(g); i = mm(c, o); j = mm(i, r); l = reduce_scatter(j, w); release(o); return (s, v, l)
"""


def test_one_account_for_all_choices_of_gradients_that_stay() -> None:
    """Those that stay are there from where they are made; their own account has all of them all the while."""
    graph = ComputeGraph(graph_of(REDUCING, **BACKWARD_INPUTS).graph, torch.device("cpu"), by_operator=True)
    account = account_compute(graph)
    products = [1, 2, 2, 1]  # at most, until the first gradient is made, and from each of them on
    for stays in itertools.product([False, True], repeat=3):
        names = tuple(name for name, stay in zip(("z", "u", "w"), stays, strict=True) if stay)
        found = account.memory(lambda slot, names=names: slot.name in names)  # type: ignore[misc]
        made = list(itertools.accumulate(stays, initial=0))
        expected = max(map(sum, zip(products, made, strict=True))) - sum(stays)
        assert found.peak == (len(BACKWARD_INPUTS) - len(UNITS) + expected) * VALUE, names


TWICE = """
g = all_gather(w); v = wait(g); a = mm(x, v); r = relu(a); release(v)
h = all_gather(u); f = wait(h); b = mm(r, f); e = exp(b); release(f)
o = swap_values_out([r], "device", "nvme"); i = swap_values_out([r, e], "device", "nvme")
k = all_gather(z); q = wait(k); c = mm(e, q); release(q)
s = wait_value(o, 0); n = wait_value(i, 1); return (c, s, n)
"""


def test_values_that_two_transfers_move_are_accounted_for_by_each_choice() -> None:
    """What one memory takes then follows from two choices: no two accounts tell."""
    graph = ComputeGraph(graph_of(TWICE, **INPUTS).graph, torch.device("cpu"), by_operator=True)
    choices = ChoiceAccounts(graph, results=1)
    assert not choices.makes_sums
    found = []
    for stays in map(frozenset, ({"r"}, {"e"}, {"r", "e"}, ())):
        account, alone = choices.account(stays), account_compute(graph, results=1, stays=stays)
        assert dataclasses.replace(account, handed=alone.handed) == alone
        found.append(account.saved)
    assert found == [2 * VALUE, 2 * VALUE, 3 * VALUE, VALUE]


@pytest.mark.parametrize("apart", [False, True])
def test_what_the_backward_does_not_read_is_accounted_for_by_each_choice(apart: bool) -> None:
    """The forward moves it, and hands it over only where it stays."""
    pair = graph_of(FORWARD, **INPUTS), graph_of(BACKWARD.replace("d = mul(c, e)", "d = mul(c, c)"), **BACKWARD_INPUTS)
    found = find_memories(*(gm.graph for gm in pair), own_outputs=1)
    mark_moving(*pair, tuple(dataclasses.replace(each, tier=Tier.NVME) for each in found))
    hops = Topology(host_apart=apart).hops
    ahead, back = (ComputeGraph(as_performed(gm.graph, hops=hops), torch.device("cpu"), by_operator=True) for gm in pair)
    forward = ChoiceAccounts(ahead, results=1)
    backward = ChoiceAccounts(back, forward=forward)
    names = [name for each in found for name in each.inputs]  # also one of two views of a memory
    for stays in map(frozenset, itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(5))):
        alone = account_compute(ahead, results=1, stays=stays)
        behind = account_compute(back, forward=alone.handed, stays=stays)
        assert forward.account(stays).memory() == alone.memory()
        assert dataclasses.replace(backward.account(stays), handed=behind.handed) == behind, stays


TILES = {"x": torch.empty(16, 16), "w": unit(16, 8), "u": unit(16, 8), "z": unit(16, 16)}
IN_TILES = """
g = all_gather(w); v = wait(g); a = mm(x, v); release(v)
h = all_gather(u); f = wait(h); b = mm(x, f); c = cat([a, b], 1); release(f)
k = all_gather(z); q = wait(k); d = mm(c, q); release(q); return (d, c)
"""
BEHIND_TILES = "b = mul(n, c); k = all_gather(z); q = wait(k); a = mm(b, q); e = mm(a, q); release(q); return (e, a, b)"


@pytest.mark.parametrize("moves", [False, True])
def test_a_matrix_that_tiles_are_written_into_has_the_name_of_its_concatenation(moves: bool) -> None:
    """By it the backward knows what the forward has saved, and choices say what stays."""
    forward = each_a_tile(graph_of(IN_TILES, **TILES))
    backward = each_a_tile(graph_of(BEHIND_TILES, n=torch.empty(16, 16), c=torch.empty(16, 16), z=unit(16, 16)))
    (found,) = find_memories(forward.graph, backward.graph, own_outputs=1)
    if moves:
        mark_moving(forward, backward, (dataclasses.replace(found, tier=Tier.NVME),))
    hops, cpu = Topology(host_apart=False).hops, torch.device("cpu")
    ahead, back = (ComputeGraph(as_performed(gm.graph, hops=hops), cpu, by_operator=True) for gm in (forward, backward))
    assert not ahead.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    stays = frozenset(found.inputs)
    account = account_compute(ahead, results=1, stays=stays)
    assert (account.memory().peak, account.saved) == (4 * VALUE, 2 * VALUE), "x, c, d, and the result of the call before"
    behind = account_compute(back, forward=account.handed, stays=stays)
    assert behind.memory().peak == 5 * VALUE, "n, b, a, e, and the forward's result: c is no longer there"
