"""Small parameters that a schedule brings at one point are brought by one copy, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import late
import pytest
import torch
from gradient_cases import train

from zinf_compile.runtime.device.link import AcceleratorLink
from zinf_compile.runtime.lanes.stream_lane import StreamLane
from zinf_compile.runtime.units import swap

HOST = {"params": "host", "grads": "host", "optimizer": "host"}


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By lane, the transfers that were issued."""
    found: dict[str, int] = {}
    submit: Callable[..., Any] = StreamLane.submit

    def counted(lane: StreamLane, *args: Any, **kwargs: Any) -> Any:
        found[lane._name] = found.get(lane._name, 0) + 1
        return submit(lane, *args, **kwargs)

    monkeypatch.setattr(StreamLane, "submit", counted)
    return found


def trained(issued: dict[str, int]) -> tuple[list[torch.Tensor], int]:
    issued.clear()
    with late.delays(0.001, seed=2):
        losses = train("late", HOST, micro_batches=1, before_step=lambda model: None).losses
        assert late.defects() == []
    return losses, issued["zinf host to device"]


def test_one_copy_brings_a_group_with_the_same_bits(issued: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    together, copies = trained(issued)
    monkeypatch.setattr(AcceleratorLink, "copies_together", False)
    apart, more = trained(issued)
    assert all(map(torch.equal, together, apart))
    assert copies == 3 * 2, "one for each forward and backward"
    assert more == 3 * (16 + 7), "4 parameters of 4 layers; the backward needs all weights but the first"


def test_large_ones_are_copied_by_themselves(issued: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "SMALL_BYTES", 32 * 96 * 4 - 1)
    _, copies = trained(issued)
    assert copies == 3 * (8 + 1 + 7), "weights one by one, and the biases of all layers"


def test_a_group_is_one_call_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    copy = torch._foreach_copy_

    def counted(into: list[torch.Tensor], *others: Any, **named: Any) -> Any:
        groups.append(len(into))
        return copy(into, *others, **named)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    train("late", HOST, micro_batches=1, before_step=lambda model: None)
    assert groups == [16, 7] * 3, "a forward's, a backward's"
