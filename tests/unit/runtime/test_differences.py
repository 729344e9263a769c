"""Advice for ranks that do different things, from what they say that they do."""

from __future__ import annotations

import pytest

from zinf_compile.runtime.comm.differences import first_difference

GRAPH = ["starting the forward of graph 0", "", "all_gather group 0: a.weight [8] float32"]


@pytest.mark.parametrize(
    ("other", "advice"),
    [
        (["saving the model", "", "saving the model"], "take the call out of `if rank == 0:`"),
        (["saving a checkpoint", "", "saving a checkpoint"], "take the call out of `if rank == 0:`"),
        (["opening a checkpoint", "", "opening a checkpoint"], "take the call out of `if rank == 0:`"),
        (
            ["reducing the gradients of a step", "", "gradient of a.weight, unit 0"],
            "One rank is at its step, or takes norms for it, while another begins a micro-batch",
        ),
        (
            ["norm of the gradient of a.weight", "", "norm of a.weight"],
            "One rank is at its step, or takes norms for it, while another begins a micro-batch",
        ),
        (["starting the backward of graph 0", "", "reduce_scatter"], "one rank has called it once more"),
        (["starting the forward of graph 1", "", "all_gather group 1: b [3] float32"], "its graphs differ"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_usual_causes_are_named(other: list[str], advice: str, turned: bool) -> None:
    text = first_difference([GRAPH, other] if turned else [other, GRAPH])
    assert advice in text
    assert text.count("One rank is at its step") + text.count("if rank == 0") <= 1


def test_nothing_is_advised_where_both_save() -> None:
    text = first_difference([["saving the model", "", "a"], ["saving a checkpoint", "", "b"]])
    assert text.endswith("in the same order.")
