"""Full parameters that stay gathered for their backward, full gradients that stay until the step: within the device's cap."""

from __future__ import annotations

import pytest
from marks import more
from rank_kept_late import whole_gradients_within_caps, within_caps
from ranks import run_ranks


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 2), more("wide", 2), more("experts", 3), more("pictures", 2)])
def test_what_is_kept_is_within_the_cap(name: str, ranks: int) -> None:
    for found in run_ranks(within_caps, ranks, name, alone=True, backend="late"):
        for cap, peak, _ in found:
            assert peak <= cap, found
        received = [bytes_ for *_, bytes_ in found]
        assert received == sorted(received, reverse=True)
        assert received[-1] < received[0]


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 2), more("wide", 3), more("experts", 2)])
def test_whole_gradients_are_within_the_cap(name: str, ranks: int) -> None:
    for found in run_ranks(whole_gradients_within_caps, ranks, name, alone=True, backend="late"):
        for cap, peak in found:
            assert peak <= cap, found
