"""What training loops compute with parameters outside the graph, on several ranks: the numbers of eager."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import rank_shard_ops
from marks import more
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")]

DEVICE, NVME = ("device",) * 3, ("nvme",) * 3


@pytest.mark.parametrize(
    ("size", "tiers", "name"),
    [(2, DEVICE, "mlp"), (2, NVME, "mlp"), more(3, DEVICE, "odd_shapes"), more(4, ("nvme", "device", "device"), "mlp")],
)
def test_loops_by_hand_averages_penalties_and_twins(size: int, tiers: tuple[str, str, str], name: str, tmp_path: Path) -> None:
    run_ranks(rank_shard_ops.train, size, str(tmp_path), tiers, name)


def test_what_one_rank_does_alone_is_an_error_on_all(tmp_path: Path) -> None:
    messages = {
        "alone": r"RankMismatchError: .*norm\(\) of parameter first.weight",
        "another": r"RankMismatchError: .*sum\(\) of parameter (first|second).weight",
        "whole": r"RankMismatchError: add\(\) .*like first.weight and of a whole tensor.*same values on all ranks",
        "equal": "gave tensor",
        "changed": r"RankMismatchError: .*changes of parameters outside graphs .*mul_\(\) of first.weight",
        "loaded": "gave tensor",
    }
    for found in run_ranks(rank_shard_ops.alone, 2, str(tmp_path)):
        assert list(found) == list(messages)
        for name, message in messages.items():
            assert re.match(message, found[name], re.DOTALL), (name, found[name])
