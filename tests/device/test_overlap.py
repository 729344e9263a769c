"""Gathers, copies and compute go on at the same time: by the streams' own logs, in a model of time that nothing disturbs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from late_training import PLACEMENTS
from rank_overlap_late import COMPUTE, LAYERS, Span, overlapped_s, spans_of_a_step, total_s
from ranks import run_ranks

from zinf_compile.runtime.lanes.stream_lane import StreamLane


def forward_of(spans: dict[str, list[Span]]) -> tuple[list[Span], list[Span]]:
    """Return products of the forward, and copies to the device that begin before its last one does."""
    products = spans["aten::addmm.out"]
    return products, [span for span in spans["copy to device"] if span[0] < products[-1][0]]


def test_parameters_of_the_next_layer_come_while_one_computes() -> None:
    products, copies = forward_of(spans_of_a_step(0, 1, PLACEMENTS["parameters on the host"]))
    assert len(products) == 2 * LAYERS
    assert all(before[1] == after[0] for before, after in itertools.pairwise(products)), "compute never stands still"
    alone = total_s([span for span in copies if span[1] <= products[0][0]])
    assert alone <= 4, "what the first layer needs comes first"
    assert overlapped_s(copies, products) == total_s(copies) - alone


def test_where_copies_are_waited_for_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure sees it."""

    def waited(submit: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any, **named: Any) -> Any:
            transfer = submit(*args, **named)
            transfer.wait()
            return transfer

        return waits

    monkeypatch.setattr(StreamLane, "submit", waited(StreamLane.submit))
    products, copies = forward_of(spans_of_a_step(0, 1, PLACEMENTS["parameters on the host"]))
    assert overlapped_s(copies, products) == 0


def test_gradients_leave_while_the_backward_goes_on() -> None:
    spans = spans_of_a_step(0, 1, PLACEMENTS["gradients on the host"])
    leaving, products = spans["copy to host"], [span for name in COMPUTE for span in spans[name]]
    assert len(leaving) == 4 * LAYERS
    assert overlapped_s(leaving, products) >= 0.8 * total_s(leaving)
    last = max(end for _, end in products)
    assert total_s([span for span in leaving if span[0] >= last]) <= 4, "only those of the first layer leave after the backward"


@pytest.mark.distributed
def test_gathers_and_reductions_go_on_beside_compute() -> None:
    for spans in run_ranks(spans_of_a_step, 2, {}, backend="late"):
        products = [span for name in COMPUTE for span in spans[name]]
        for collective in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            assert len(spans[collective]) >= 2 * LAYERS
            assert overlapped_s(spans[collective], products) >= 0.8 * total_s(spans[collective])


@pytest.mark.distributed
def test_copies_gathers_and_compute_go_on_together() -> None:
    """Three stages: what is copied for one layer, gathered for another, computed for a third."""
    for spans in run_ranks(spans_of_a_step, 2, PLACEMENTS["parameters on the host"], backend="late"):
        products, copies = forward_of(spans)
        gathers = [span for span in spans["all_gather_into_tensor"] if span[0] < products[-1][0]]
        assert overlapped_s(copies, products) > 0
        assert overlapped_s(gathers, products) >= 0.8 * total_s(gathers)
        assert overlapped_s(copies, gathers) > 0
