"""The account of one graph's compute, made once: what it says follows from which gradients stay where they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.plan.compute_memory import ComputeMemory


class ForwardValues:
    """What a forward hands to its backward, by the names that AOTAutograd gives in both."""

    def __init__(self) -> None:
        self.memory_of: dict[str, tuple[str, int]] = {}
        """By the name of a value, a key of its memory: equal for views of one memory."""
        self.bytes: dict[tuple[str, int], int] = {}
        self.kept: set[tuple[str, int]] = set()
        """Memories that are the caller's: the graph's inputs, and its results."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of a graph from where one gradient is made that may stay, to where the next one is."""

    kept: int
    """Activations, in bytes, at the moment when most is held."""
    temporaries: int
    """Temporaries then, without gradients that may stay."""
    gradient: ParameterSlot | None = None
    """Whose gradient is made at the beginning."""
    made: int = 0
    """Its bytes."""
    own: int = 0
    """Its bytes by the account of gradients, which are taken off where it stays."""
    start: int = 0
    """The place of its first node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeAccount:
    """The memory of one graph's compute, for any choice of the gradients that are kept where they are made."""

    stretches: Sequence[Stretch]
    live: Sequence[int]
    """Bytes of activations and temporaries at each node, without gradients that may stay."""
    beside: int
    """Bytes that the caller holds besides all the while."""
    saved: int
    results: int
    handed: ForwardValues
    """What a forward hands to its backward; nothing where the graph is one."""

    def memory(self, gradient_stays: Callable[[ParameterSlot], bool] = lambda slot: False) -> ComputeMemory:
        """Return the memory, where `gradient_stays` says of which parameters; another account has these gradients then."""
        kept = temporaries = most = made = staying = 0
        for stretch in self.stretches:
            if stretch.gradient is not None and gradient_stays(stretch.gradient):
                made += stretch.made
                staying += stretch.own
            here = stretch.kept + stretch.temporaries + made
            if here > most:
                most, kept, temporaries = here, stretch.kept, stretch.temporaries + made
        return ComputeMemory(
            activations=min(kept, most - staying) + self.beside,
            temporaries=max(0, temporaries - staying),
            saved=self.saved,
            results=self.results,
        )

    def free(self, gradient_stays: Callable[[ParameterSlot], bool] = lambda slot: False) -> list[int]:
        """Return the bytes by which each node holds less than the one that holds most."""
        held = self.held(gradient_stays)
        most = max(held, default=0)
        return [most - each for each in held]

    def held(self, gradient_stays: Callable[[ParameterSlot], bool] = lambda slot: False) -> list[int]:
        """Return the bytes that exist at each node, without those `beside`."""
        held, made = list(self.live), 0
        for stretch, end in zip(self.stretches, [*(each.start for each in self.stretches[1:]), len(held)], strict=True):
            if stretch.gradient is not None and gradient_stays(stretch.gradient):
                made += stretch.made
            for place in range(stretch.start, end):
                held[place] += made
        return held
