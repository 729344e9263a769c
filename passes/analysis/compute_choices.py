"""Accounts of one graph's compute for each choice of the saved values that stay on the device, made of two of them.

Note: two accounts make all
    An account goes through the whole graph. With all values away it differs from that with none away by memories of the values
    that move: each of these is in one of them, or longer than in the other. Where values that move together have these to
    themselves, each memory is there with another choice as one of the two accounts says: what is held at each node is a sum.
    Where anything else differs, each choice is accounted for by itself; so it does in a backward for what the forward alone
    moves.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from .compute_account import ComputeAccount, ForwardValues
from .compute_graph import ComputeGraph
from .compute_memory import Life, LiveMemories, Memory, account_compute, live_bytes, scratch_of, stretches_of

Together = frozenset[str]
"""The names of values that move together."""


class ChoiceAccounts:
    """The accounts of one graph in which all saved values that may leave do, for any of them that stay; see `account_compute`."""

    def __init__(self, graph: ComputeGraph, *, forward: ChoiceAccounts | None = None, results: int | None = None) -> None:
        """`forward`: of the graph whose backward this is. `results`: as `account_compute` takes it."""
        self.graph = graph
        self._forward, self._results = forward, results
        self._moving = {node: frozenset(value.name for value in values) for node, values in graph.moving.items()}
        self._together: set[Together] = {*self._moving.values(), *(() if forward is None else forward._together)}

    @property
    def makes_sums(self) -> bool:
        """Whether two accounts make those of all choices."""
        return self._differences is not None

    def account(self, stays: frozenset[str]) -> ComputeAccount:
        """Return the account where the values of these names stay; names that aren't the graph's say nothing."""
        staying = [names for names in self._together if names & stays]
        if not staying:
            return self._away.account
        whole = all(names <= stays for names in staying)
        if whole and len(staying) == len(self._together):
            return self._here.account
        if self._differences is None or not whole:
            return account_compute(self.graph, forward=self._handed(stays), results=self._results, stays=stays)
        return self._sum([self._differences[names] for names in staying])

    @cached_property
    def _away(self) -> LiveMemories:
        return self._memories(frozenset())

    @cached_property
    def _here(self) -> LiveMemories:
        return self._memories(frozenset().union(*self._together))

    def _memories(self, stays: frozenset[str]) -> LiveMemories:
        return LiveMemories(self.graph, forward=self._handed(stays), results=self._results, stays=stays)

    def _handed(self, stays: frozenset[str]) -> ForwardValues | None:
        return None if self._forward is None else self._forward.account(stays).handed

    def _sum(self, differences: Sequence[_Difference]) -> ComputeAccount:
        """Return the account with all values away, but for these differences."""
        away, here = self._away, self._here.account.handed
        changes, handed = away.changes.copy(), copy.deepcopy(away.account.handed)
        rows = [row for each in differences for row in each.changes]
        if rows:
            kinds, places, sizes = zip(*rows, strict=True)
            np.add.at(changes, (kinds, places), sizes)
        for each in differences:
            handed.memory_of.update(each.memory_of)
        handed.bytes.update((key, here.bytes[key]) for each in differences for key in each.memory_of.values())
        live = live_bytes(changes, scratch_of(self.graph))
        return dataclasses.replace(
            away.account,
            stretches=stretches_of(live, away.gradients),
            live=live.sum(0).tolist(),
            saved=away.account.saved + sum(each.saved for each in differences),
            handed=handed,
        )

    @cached_property
    def _differences(self) -> Mapping[Together, _Difference] | None:
        """By what the two accounts differ, for what moves together; None where anything else differs."""
        away, here = self._away, self._here
        one, other = away.account, here.account
        named = {name: names for names in self._together for name in names}
        if len(named) < sum(map(len, self._together)) or (one.beside, one.results) != (other.beside, other.results):
            return None
        if away.made != here.made or away.gradients != here.gradients or one.handed.kept != other.handed.kept:
            return None
        found = {names: _Difference() for names in self._together}
        gone, come, owners = away.lives(), here.lives(), self._owners(away, here)
        for memory in {**gone, **come}:
            if gone.get(memory) == come.get(memory):
                continue
            if memory not in owners:
                return None
            found[owners[memory]].changes += [*_changes(gone.get(memory), -1), *_changes(come.get(memory), 1)]
        for memory in away.saved ^ here.saved:
            if memory in away.saved or memory not in owners:
                return None
            found[owners[memory]].saved += come[memory].bytes if memory in come else 0
        rows = one.handed.memory_of.items() ^ other.handed.memory_of.items()
        if not one.handed.bytes.items() <= other.handed.bytes.items():
            return None
        for name, key in rows:
            if name in one.handed.memory_of or name not in named:
                return None
            found[named[name]].memory_of[name] = key
        return found

    def _owners(self, away: LiveMemories, here: LiveMemories) -> dict[Memory, Together]:
        """Return the values that move together by memory that these alone have, away or here."""
        found: dict[Memory, set[Together]] = {}
        for node, values in self.graph.moving.items():
            for memory in itertools.chain(away.behind(node), *map(away.behind, values), *map(here.behind, values)):
                found.setdefault(memory, set()).add(self._moving[node])
        return {memory: next(iter(owners)) for memory, owners in found.items() if len(owners) == 1}


@dataclasses.dataclass(slots=True)
class _Difference:
    """What differs where the values of one memory stay."""

    changes: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """Rows of `changes_of`, each (row, place, bytes)."""
    saved: int = 0
    """More bytes that are saved."""
    memory_of: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    """As `ForwardValues` has it, of these values."""


def _changes(life: Life | None, sign: int) -> Iterator[tuple[int, int, int]]:
    if life is not None:
        row = int(not life.is_activation)
        yield row, life.born, sign * life.bytes
        yield row, life.dies + 1, -sign * life.bytes
