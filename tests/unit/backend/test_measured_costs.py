"""Costs from records of steps: what transfers between ranks take, without the wait for the rank that comes last."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zinf_compile.backend.measured_costs import collective_costs
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.problem_parts import Link
from zinf_compile.runtime.lanes.step_recorder import Recorded, StepRecord

LINKS = [
    Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=1e9),
    Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=1e9),
]
SIZE = 1 << 20


def record(lane: str, seconds: Sequence[float]) -> StepRecord:
    spans, now = [], 0.0
    for each in seconds:
        spans.append(Recorded(lane, "", now, now + each, SIZE))
        now += each + 1.0
    return StepRecord(seconds=now, spans=tuple(spans), waits=(), graphs=(), memory={})


def costs_of_ranks(ranks: Sequence[Sequence[StepRecord]]) -> list[dict[str, float]]:
    """Return what each rank finds, with the values of all ranks put together as in an exchange."""
    sent: list[list[Sequence[float]]] = [[] for _ in ranks]

    def run(rank: int, answers: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
        sent[rank].clear()

        def exchange(values: Sequence[float]) -> Sequence[Sequence[float]]:
            sent[rank].append(values)
            number = len(sent[rank]) - 1
            return answers[number] if number < len(answers) else [values] * len(ranks)

        return {name: cost.bytes_per_second for name, cost in collective_costs(ranks[rank], LINKS, exchange).items()}

    answers: list[Sequence[Sequence[float]]] = []
    for _ in range(2):
        for rank in range(len(ranks)):
            run(rank, answers)
        if all(len(each) > len(answers) for each in sent):
            answers.append([each[len(answers)] for each in sent])
    return [run(rank, answers) for rank in range(len(ranks))]


def test_each_transfer_takes_as_long_as_for_the_rank_that_came_last() -> None:
    first = [record("from ranks", [0.1, 0.5, 0.1, 0.5]), record("from ranks", [0.1])]
    second = [record("from ranks", [0.3, 0.1, 0.9, 0.1]), record("from ranks", [0.2])]
    found = costs_of_ranks([first, second])
    assert found[0] == found[1]
    assert found[0] == {"from ranks": pytest.approx(SIZE / 0.1)}


def test_ranks_that_recorded_other_numbers_of_them_say_nothing() -> None:
    assert costs_of_ranks([[record("to ranks", [0.1] * 5)], [record("to ranks", [0.1] * 4)]]) == [{}, {}]
