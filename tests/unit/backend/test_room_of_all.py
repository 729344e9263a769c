"""Ranks that plan a graph together go by the least room of all, region by region."""

from __future__ import annotations

from typing import Any

import torch

from zinf_compile.backend.room_of_all import room_of_all
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region


class Ranks:
    """A rank beside another one, whose values are given."""

    def __init__(self, device: float, host: float, free: list[float]) -> None:
        self.asked: list[str] = []
        self._room, self._free = [device, host], free

    def agree(self, lines: list[str], *, what: str, value: float) -> list[float]:
        self.asked.append(what)
        return [value, self._room.pop(0) if "plan" in what else float(len(self._free))]

    def exchange(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        self.asked.append(what)
        theirs = torch.tensor(self._free, dtype=torch.float64)
        return torch.stack([values, theirs if len(values) == len(theirs) else theirs.amin().unsqueeze(0)])


def problem(device: int | None, host: int | None, taken: list[int]) -> StepProblem:
    return StepProblem(
        regions=tuple(Region(name=f"r{n}", seconds=1.0, workspace_bytes=count) for n, count in enumerate(taken)),
        memories=(Memory(tier=Tier.DEVICE, bytes=device), Memory(tier=Tier.HOST, bytes=host)),
        links=(
            Link(name="down", source=Tier.HOST, destination=Tier.DEVICE, bytes_per_second=1.0),
            Link(name="up", source=Tier.DEVICE, destination=Tier.HOST, bytes_per_second=1.0),
        ),
    )


def free(found: StepProblem) -> list[float]:
    return [found.room(Tier.DEVICE) - region.workspace_bytes for region in found.regions]


def test_each_region_has_what_all_ranks_have() -> None:
    ranks: Any = Ranks(90.0, 50.0, [30.0, 70.0, 90.0])
    found = room_of_all(problem(100, 60, [0, 40, 60]), ranks)
    assert free(found) == [30, 60, 40]
    assert found.room(Tier.HOST) == 50
    assert min(region.workspace_bytes for region in found.regions) == 0


def test_other_numbers_of_regions_have_the_least_of_all() -> None:
    ranks: Any = Ranks(90.0, 50.0, [35.0, 90.0])
    assert free(room_of_all(problem(100, 60, [0, 40, 20]), ranks)) == [35, 35, 35]


def test_without_a_cap_nothing_is_asked_of_regions() -> None:
    ranks: Any = Ranks(float("inf"), 50.0, [1.0, 2.0])
    found = room_of_all(problem(None, None, [3, 4]), ranks)
    assert [memory.bytes for memory in found.memories] == [None, 50]
    assert [region.workspace_bytes for region in found.regions] == [3, 4]
    assert len(ranks.asked) == 2
