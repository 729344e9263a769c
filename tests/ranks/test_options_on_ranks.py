"""Options that ranks give unlike each other: an error on all of them names the difference, long before a rank waits in vain."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks import more
from rank_options import device_of_each_rank, files_of_each_rank, other_caps, other_machines
from ranks import run_ranks

from zinf_compile.ir.device_rates import DeviceRates

pytestmark = pytest.mark.distributed
SOON_S = 50.0
"""Less than timeout_s."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_device_memory_of_each_rank_is_named_on_all(ranks: int) -> None:
    for first, later in run_ranks(other_caps, ranks):
        for kind, text, seconds in (first, later):
            assert kind in ("OptionError", "RankMismatchError"), text
            assert "device_memory=64MiB" in text, text
            assert "device_memory=65MiB" in text, text
            assert seconds < SOON_S


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_machine_of_the_same_name_and_other_rates_is_named_on_all(ranks: int, tmp_path: Path) -> None:
    for kind, text, seconds in run_ranks(other_machines, ranks, str(tmp_path)):
        assert kind == "OptionError", text
        assert "machine=a file of digest" in text, text
        assert seconds < SOON_S


def test_the_same_machine_may_be_a_file_of_another_name_on_each_rank(tmp_path: Path) -> None:
    first, second = run_ranks(files_of_each_rank, 2, str(tmp_path))
    assert first == second


@pytest.mark.parametrize("ranks", [2, more(3)])
def test_ranks_go_by_the_device_that_is_slowest(ranks: int) -> None:
    found = run_ranks(device_of_each_rank, ranks, {"activations": "auto"})
    slowest = 1e8 / 10**ranks
    assert [rates for rates, _ in found] == [DeviceRates(to_device=slowest, to_host=slowest)] * ranks
    assert all(saved == found[0][1] for _, saved in found)
