"""Parameters that a schedule brings at one point are brought by one copy, and so leave gradients, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from gradient_cases import train
from held_updates import held_updates
from torch import nn

from zinf_compile.runtime import swap_steps
from zinf_compile.runtime.device.link import AcceleratorLink
from zinf_compile.runtime.lanes.stream_lane import StreamLane
from zinf_compile.runtime.memory.inflight import InflightLimit
from zinf_compile.runtime.units.pending_updates import Updates

OUT = "zinf device to host"
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


def trained(issued: dict[str, int], way: str = "zinf host to device", **options: Any) -> tuple[list[torch.Tensor], int]:
    issued.clear()
    with late.delays(0.001, seed=2):
        losses = train("late", {**HOST, **options}, micro_batches=1, before_step=lambda model: None).losses
        assert late.defects() == []
    return losses, issued[way]


def test_one_copy_brings_a_group_with_the_same_bits(issued: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    together, copies = trained(issued)
    monkeypatch.setattr(AcceleratorLink, "copies_together", False)
    apart, more = trained(issued)
    assert all(map(torch.equal, together, apart))
    assert copies == 3 * 2, "one for each forward and backward"
    assert more == 3 * (16 + 6), (
        "4 parameters of 4 layers; the backward needs all weights but the first, and finds the last there"
    )


def test_one_copy_brings_what_a_step_has_still_to_update(issued: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that updates stands still until the next forward has asked for all of it."""
    begin_after, asked = Updates.begin_after, list[int]()
    pieces = {"piece_numel": 4096}
    with held_updates(after=0) as gate:

        def noted(updates: Updates[Any], read: Sequence[Any], begin: Callable[[], Any]) -> Any:
            begun = begin_after(updates, read, begin)
            asked.append(len(read))
            gate.set()
            return begun

        monkeypatch.setattr(Updates, "begin_after", noted)
        together, _ = trained(issued, compute_shape=pieces)
    assert asked[0] == 15, "all but those of the chunk that the step itself has updated"
    monkeypatch.setattr(AcceleratorLink, "copies_together", False)
    apart, _ = trained(issued, compute_shape=pieces)
    assert all(map(torch.equal, together, apart))


def test_one_copy_takes_the_gradients_of_a_group_with_the_same_bits(
    issued: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, copies = trained(issued, OUT)
    bucketed, by_bucket = trained(issued, OUT, bucket="16KiB")
    monkeypatch.setattr(AcceleratorLink, "copies_together", False)
    apart, more = trained(issued, OUT)
    assert all(map(torch.equal, together, apart))
    assert all(map(torch.equal, bucketed, apart))
    assert more == 3 * 16 + 16, "of each step, and once all parameters"
    assert copies == 3 * 1 + 16
    assert copies < by_bucket < more


def test_gradients_leave_by_copies_of_half_of_what_may_be_under_way(
    issued: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one layer at a time: the next one's is issued while that is copied."""
    most = 2 * 4 * (2 * 32 * 96 + 96 + 32)
    monkeypatch.setattr(InflightLimit, "limit", property(lambda limit: most, lambda limit, value: None), raising=False)
    _, copies = trained(issued, OUT)
    assert copies == 3 * 4 + 16


def test_a_group_is_one_call_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    copy = torch._foreach_copy_

    def counted(into: list[torch.Tensor], *others: Any, **named: Any) -> Any:
        groups.append(len(into))
        return copy(into, *others, **named)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    train("late", HOST, micro_batches=1, before_step=lambda model: None)
    assert groups == [16, 6, 16] * 3, "a forward's, a backward's but what that begins with, the gradients'"


def test_what_one_read_brings_to_the_host_goes_on_by_one_copy(
    issued: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside what a step has still to update, which the forward is handed as it is updated."""
    groups, pass_on = list[int](), swap_steps.pass_on_together

    def noted(earlier: Sequence[Any]) -> Any:
        groups.append(len(earlier))
        return pass_on(earlier)

    monkeypatch.setattr(swap_steps, "pass_on_together", noted)
    on_drive = {"params": "nvme", "nvme": str(tmp_path)}
    together, _ = trained(issued, **on_drive)
    assert groups[:2] == [16, 6], "the first forward's, and its backward's"
    assert groups.count(6) >= 3
    in_memory, _ = trained(issued)
    assert all(map(torch.equal, together, in_memory))


@pytest.mark.parametrize(
    ("options", "arriving", "leaving"),
    [
        ({**HOST, "update": "device"}, 1 + 3, 2 + 3),
        ({"params": "host", "grads": "device", "optimizer": "device"}, 1 + 3, 1 + 1),
        ({"params": "device", "grads": "device", "optimizer": "host"}, 1 + 1, 1 + 1),
    ],
    ids=["updated on the device", "parameters on the host", "states on the host"],
)
def test_one_copy_brings_what_a_chunk_updates(
    options: dict[str, str], arriving: int, leaving: int, issued: dict[str, int]
) -> None:
    """With its gradients and states, and one takes the values back, another the states, whatever the number of parameters.

    From the second step on, of which the update counts, and all of the third: new states go where they live one by one.
    """
    counts = []
    for layers in (4, 6):
        steps: list[nn.Module] = []

        def before_step(model: nn.Module, steps: list[nn.Module] = steps) -> None:
            steps.append(model)
            if len(steps) == 2:
                issued.clear()

        torch.compiler.reset()
        with late.delays(0.001, seed=2):
            train("late", options, layers=layers, micro_batches=1, before_step=before_step)
        assert late.defects() == []
        counts.append((issued["zinf host to device"], issued[OUT]))
    assert counts == [(arriving, leaving)] * 2
