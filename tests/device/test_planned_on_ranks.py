"""Several ranks are planned by default within the cap of their devices: by one plan, with the same bits, and never beyond it."""

from __future__ import annotations

from typing import Any

import pytest
from marks import more
from rank_planned_late import FAR, one_with_larger_batches, planned_within_caps
from ranks import run_ranks

DECIDED: dict[str, Any] = dict.fromkeys(FAR, "auto")


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [("wide", FAR, 3), more("wide", DECIDED, 2), more("experts", FAR, 3), more("gpt", FAR, 2), more("gpt", DECIDED, 2)],
)
def test_several_ranks_are_planned_within_the_cap(name: str, options: dict[str, Any], ranks: int) -> None:
    for found in run_ranks(planned_within_caps, ranks, name, options, alone=True, backend="late"):
        assert all(planned.planners == {"cached_prefetch"} for planned in found)
        assert all(planned.peak <= planned.cap for planned in found), found
        assert options == DECIDED or any(planned.left for planned in found), found


def test_a_rank_that_compiles_again_alone_keeps_to_the_cap() -> None:
    for found in run_ranks(one_with_larger_batches, 2, "wide", (8, 16), alone=True, backend="late"):
        assert all(peak <= cap for cap, peak in found), found
