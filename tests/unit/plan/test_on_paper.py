"""What is read off a plan: bytes written, tokens until compute sets the step, least budgets; and trace events."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import training

from zinf_compile.errors import BudgetError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.on_paper import compute_bound_at, least_budgets, written_bytes
from zinf_compile.plan.perfetto import trace_events
from zinf_compile.plan.planners import cached_prefetch, just_in_time
from zinf_compile.plan.simulate import simulate


def test_bytes_written_are_those_of_states_gradients_and_values() -> None:
    problem = training(5, 3, saved=False, device=0.0, host=0.0)
    timeline = simulate(problem, just_in_time(problem))
    numel = sum(unit.stored_bytes for unit in problem.units) // 2
    assert written_bytes(problem, timeline) == (12 + 4 + 2) * numel


def test_more_tokens_hide_more() -> None:
    slow, fast = (training(5, 3, saved=False, device=0.0, host=0.0, speed=speed) for speed in (0.1, 100.0))
    found = [compute_bound_at(problem, simulate(problem, just_in_time(problem))) for problem in (slow, fast)]
    assert found[0] > 5
    assert found[1] == 1.0


def test_the_least_budgets_fit_and_less_does_not() -> None:
    problem = training(5, 3, device=0.3, host=0.3)
    needed = {memory.tier: int(memory.bytes or 0) for memory in problem.memories}
    small = problem.with_budgets(device=needed[Tier.DEVICE] // 4, host=needed[Tier.HOST])
    least = least_budgets(small, just_in_time)
    assert least is not None
    just_in_time(small.with_budgets(**{str(tier): count for tier, count in least.items()}))
    assert least[Tier.HOST] == needed[Tier.HOST]
    with pytest.raises(BudgetError):
        just_in_time(small.with_budgets(device=int(least[Tier.DEVICE] * 0.98)))


def test_each_span_is_an_event_and_each_tier_a_counter() -> None:
    problem = training(5, 3)
    timeline = simulate(problem, cached_prefetch(problem))
    events = trace_events(timeline, name="a plan")
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, timeline.lanes.values()))
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == set(timeline.lanes)
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        f"bytes on {tier}" for tier in timeline.memory if timeline.memory[tier]
    }
    assert max(event["ts"] + event["dur"] for event in spans if event["tid"] == 1) > 0


def test_no_event_has_a_negative_time() -> None:
    """As of an update that began in the step before: Perfetto would drop it."""
    timeline = simulate(problem := training(5, 3), cached_prefetch(problem))
    early = dataclasses.replace(timeline.lanes["compute"][0], start=-0.5, end=-0.25)
    shifted = dataclasses.replace(timeline, lanes={"earlier": (early,), **timeline.lanes})
    before = [event["ts"] for event in trace_events(timeline) if "ts" in event]
    after = [event["ts"] for event in trace_events(shifted) if "ts" in event]
    assert min(before) >= 0
    assert min(after) == after[0] == 0
    assert [when - after[1] for when in after[1:]] == pytest.approx([when - before[0] for when in before])


def test_room_beyond_what_numpy_counts() -> None:
    problem = training(5, 3).with_budgets(device=2**80, host=2**80)
    assert lower_bound(problem).seconds <= simulate(problem, cached_prefetch(problem)).seconds * (1 + 1e-9)
