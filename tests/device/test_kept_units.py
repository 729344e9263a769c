"""Full parameters that stay gathered from a forward to its backward: the device's memory stays within its cap."""

from __future__ import annotations

import pytest
from marks import more
from rank_kept_late import within_caps
from ranks import run_ranks


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 2), more("wide", 2), more("experts", 3), more("pictures", 2)])
def test_what_is_kept_is_within_the_cap(name: str, ranks: int) -> None:
    for found in run_ranks(within_caps, ranks, name, alone=True, backend="late"):
        for cap, peak, _ in found:
            assert peak <= cap, found
        received = [bytes_ for *_, bytes_ in found]
        assert received == sorted(received, reverse=True)
        assert received[-1] < received[0]
