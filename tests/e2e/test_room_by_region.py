"""Plans within caps: a region has the room that its compute leaves, and the bound of a step knows the caps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.backend import plan_graphs
from zinf_compile.backend.kept_graphs import KeptGraph, kept_graph
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import verify
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

LAYERS, WIDTH, TOKENS = 6, 64, 96
CAP = 520_000
"""Bytes of the device: activations of the layers take about half, and a few layers fit beside them."""


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(SimulatedDevice(bytes_per_s=1e9)) as simulated:
        yield simulated


def trained(**options: Any) -> tuple[nn.Module, Any]:
    """Return a model after one step, and what takes another one."""
    gc.collect()  # other models of this process
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    call = torch.compile(
        model, backend=BACKEND, options={"device_memory": CAP, "bucket": 16_000, "planner": "cached_prefetch", **options}
    )
    optimizer = adamw(model.parameters())
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        call(torch.randn(TOKENS, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()

    step()
    return model, step


def graphs_of(model: nn.Module, step: Any) -> dict[str, KeptGraph]:
    recording = zinf_compile.timeline(model)
    step()
    step()
    assert recording.record is not None
    names = [run.program for run in recording.record.graphs]
    found = {name.partition(" of ")[0]: kept_graph(name) for name in names}
    assert all(found.values())
    return found  # type: ignore[return-value]


@pytest.mark.usefixtures("device")
def test_a_region_has_what_its_compute_leaves() -> None:
    """More at the beginning of the forward, and at the end of the backward: activations are few there."""
    model, step = trained(params="host", grads="host", optimizer="host")
    graphs = graphs_of(model, step)
    forward, backward = ([region.workspace_bytes for region in graphs[name].problem.regions] for name in ("forward", "backward"))
    assert min(forward) == min(forward[:2]) == 0 < max(forward[-2:]) == max(forward)
    assert min(backward) == min(backward[-2:]) == 0 < max(backward) == max(backward[:3])
    for kept in graphs.values():
        room = kept.problem.room(Tier.DEVICE)
        assert occupied(kept.problem, kept.plan)[Tier.DEVICE].max() <= room < CAP


def test_where_host_memory_is_the_device_an_arena_keeps_what_it_lent(tmp_path: Any) -> None:
    model, step = trained(params="nvme", grads="nvme", optimizer="nvme", nvme=str(tmp_path), device_memory=1_500_000)
    for kept in graphs_of(model, step).values():
        assert {region.workspace_bytes for region in kept.problem.regions} == {0}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("given", [{}, {"params": "host"}, {"activations": "host"}, {"params": "host", "grads": "host"}])
def test_a_recorded_step_is_a_legal_plan_within_the_caps(given: dict[str, str]) -> None:
    """Whatever lives where: each parameter is updated where its states live, and saved values may leave."""
    model, step = trained(**given)
    recording = zinf_compile.timeline(model)
    step()
    step()
    assert recording.planned is not None
    problem, plan = recording.planned.problem, recording.planned.plan
    assert problem.room(Tier.DEVICE) == CAP
    assert verify(problem, plan) == []
    for update in plan.local.updates:
        assert update.on == plan.local.homes.states[update.piece]
    bound = recording.bound()
    assert bound is not None
    assert bound.seconds <= step_seconds(problem, plan) * (1 + 1e-6)


@pytest.mark.parametrize(("given", "planner"), [({}, "cached_prefetch"), ({"planner": "one_ahead"}, "one_ahead")])
def test_one_device_with_a_cap_is_planned_for(given: dict[str, str], planner: str, device: SimulatedDevice) -> None:
    model, step = trained(params="host", grads="host", optimizer="host", **({"planner": None} | given))
    assert {kept.plan.planner for kept in graphs_of(model, step).values()} == {planner}


@pytest.mark.usefixtures("device")
def test_a_graph_of_many_regions_is_planned_by_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default takes seconds for hundreds of regions, also where it plans again between two steps."""
    monkeypatch.setattr(plan_graphs, "LARGE", 2)
    for given, planner in ((None, "greedy"), ("cached_prefetch", "cached_prefetch")):
        model, step = trained(params="host", grads="host", optimizer="host", planner=given)
        assert {kept.plan.planner for kept in graphs_of(model, step).values()} == {planner}


@pytest.mark.parametrize("apart", [False, True])
def test_without_a_cap_or_without_a_device_fixed_rules_decide(apart: bool, tmp_path: Any) -> None:
    away = dict.fromkeys(("params", "grads", "optimizer"), "nvme") | {"nvme": str(tmp_path), "planner": None}
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        model, step = trained(**away, device_memory=None if apart else 1_500_000)
        recording = zinf_compile.timeline(model)
        step()
        step()
    assert recording.done
    assert recording.planned is None
    assert "was not planned" in recording.note
