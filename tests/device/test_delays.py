"""Training under delays that are drawn: the CPU's bits, and no access that nothing orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import late
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from late_training import EVERY, PLACEMENTS, Training, on_drives, same
from rank_late import check

import zinf_compile

CASES = {
    **PLACEMENTS,
    **EVERY,
    "tiles": {**PLACEMENTS["host"], "tile": 4096},
    "tiles on the drive": {**PLACEMENTS["drive"], "tile": 4096},
}
LONGEST_S = st.sampled_from((0.0001, 0.001, 0.004))
DELAYS = st.fixed_dictionaries(
    {
        "longest": LONGEST_S,
        "seed": st.integers(0, 2**64 - 1),
        "chance": st.sampled_from((0.1, 0.5, 1.0)),
        "exponential": st.booleans(),
    }
)


class Pair:
    """The same training on both devices, which goes on from run to run."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.host, self.there = (
            Training("cpu", {"tile": options["tile"]} if "tile" in options else None),
            Training("late", options),
        )
        self.steps = 0

    def run(self, delays: dict[str, Any], *, micro_batches: int, clipped: bool) -> None:
        """Take two steps, with delays on the device; compare the losses."""
        steps = range(self.steps, self.steps + 2)
        self.steps += 2
        expected = [loss for step in steps for loss in self.host.step(self.host.batches(step, micro_batches), clipped=clipped)]
        late.clear()
        with late.delays(**delays):
            batches = [self.there.batches(step, micro_batches) for step in steps]
            found = [loss for batch in batches for loss in self.there.step(batch, clipped=clipped)]
            found = [loss.cpu() for loss in found]
            torch.accelerator.synchronize()
        assert same(found, expected)
        check()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Return the pairs by case, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("drive")

    class Pairs(dict[str, Pair]):
        def __missing__(self, case: str) -> Pair:
            return self.setdefault(case, Pair(on_drives(CASES[case], folder)))

    with torch._dynamo.config.patch(recompile_limit=1000):  # one forward, compiled for each of the models
        yield Pairs()
    zinf_compile.reset()


@pytest.mark.keeps_graphs
@pytest.mark.parametrize("runs", [8, pytest.param(200, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
def test_no_access_is_unordered_whatever_the_delays(runs: int, pairs: dict[str, Pair]) -> None:
    @settings(max_examples=runs, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(case=st.sampled_from(sorted(CASES)), delays=DELAYS, micro_batches=st.integers(1, 2), clipped=st.booleans())
    def run(case: str, delays: dict[str, Any], micro_batches: int, clipped: bool) -> None:
        try:
            pairs[case].run(delays, micro_batches=micro_batches, clipped=clipped)
        except BaseException:
            pairs.pop(case, None)  # the two are no longer the same
            raise

    run()
