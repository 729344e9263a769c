"""What ranks do that were to do the same, in words: the first difference, and advice where it has a usual cause."""

from __future__ import annotations

import itertools

from .steps_done import ADVICE, differ_in_steps

ENDING = "ending"
"""The name of the last comparison, when a process ends without an error."""

_GATHER = "all_gather "
_FORWARD, _BACKWARD = "starting the forward", "starting the backward"
_ONE_CALL_MORE = (
    "Where these are of the same model, one rank has called it once more: an evaluation, a log line or a text made on some ranks "
    "alone, or loaders of different lengths; call it equally often on all ranks"
)
"""Advice where a forward meets a backward."""

_OTHER_GRAPH = (
    "Where these are of the same model, its graphs differ: a batch or a length of 1 on some ranks alone makes another one there, "
    "for PyTorch compiles sizes of 1 apart; pad such batches, or drop them on all ranks"
)
"""Advice where ranks gather in other orders."""

_FILES = ("saving ", "loading ", "opening a checkpoint")
_ON_ALL_RANKS = (
    "What saves, loads or gathers a model is called on all ranks, each of which has a part of it: take the call out of "
    "`if rank == 0:`; files of the whole are rank 0's all the same"
)
"""Advice where one rank saves or loads and another goes on."""

_STEP = ("reducing the gradients of a step", "a step", "norm of ")
_MORE_MICRO_BATCHES = (
    "One rank is at its step, or takes norms for it, while another begins a micro-batch: loaders of different lengths, or a call "
    "that one rank makes alone; give all ranks as many batches, and the same calls"
)
"""Advice where a step, or what clips before it, meets a graph."""


def first_difference(described: list[list[str]]) -> str:
    """Return what ranks that were to do the same do instead.

    `described`: of each rank what it is doing, its options, and the lines that differ from another's.
    """
    first, of_first, *expected = described[0]
    for rank, (what, options, *lines) in enumerate(described):
        for here, there in itertools.zip_longest(lines, expected, fillvalue="nothing more"):
            if here != there:
                text = (
                    f"the ranks are not doing the same thing; first difference: rank 0, {first}, has {there!r}; rank {rank}, "
                    f"{what}, has {here!r}. Every rank must use the same options and run the same graphs in the same order."
                )
                if of_first != options and (there, here) != (of_first, options):  # known to one rank, new to another
                    text = f"{text} Rank 0 has {of_first!r}; rank {rank} has {options!r}."
                if differ_in_steps(here, there):
                    text = f"{text} {ADVICE}"
                elif {_phase(first), _phase(what)} == {_FORWARD, _BACKWARD}:
                    text = f"{text} {_ONE_CALL_MORE}"
                elif here.startswith(_GATHER) and there.startswith(_GATHER):
                    text = f"{text} {_OTHER_GRAPH}"
                elif first.startswith(_FILES) != what.startswith(_FILES):
                    text = f"{text} {_ON_ALL_RANKS}"
                elif _meets(first, what) or _meets(what, first):
                    text = f"{text} {_MORE_MICRO_BATCHES}"
                if ENDING in (first, what) and first != what:
                    text = f"{text} One rank's process has ended: has it run out of batches, left the loop, or failed?"
                return text
    return "the ranks are not doing the same thing, though they describe it alike"


def _meets(one: str, other: str) -> bool:
    return one.startswith(_STEP) and bool(_phase(other))


def _phase(what: str) -> str:
    return next((phase for phase in (_FORWARD, _BACKWARD) if what.startswith(phase)), "")
