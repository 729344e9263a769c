"""On several ranks a forward leaves shards on the device for its backward: they cross the link once, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from marks import more
from rank_shards_between import leaves_shards, with_others_in_between
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),
]
FAR = dict.fromkeys(("params", "grads", "optimizer"), "host")
DRIVE = dict.fromkeys(FAR, "nvme")


@pytest.mark.parametrize(
    ("ranks", "options", "apart", "tied"),
    [
        (2, FAR, True, False),
        (3, DRIVE, False, True),
        more(2, DRIVE, True, False),
        more(3, FAR | {"tile": "1KiB"}, True, False),
        more(4, FAR | {"compute": "inductor"}, True, True),
    ],
)
def test_shards_come_once_for_both(ranks: int, options: dict[str, Any], apart: bool, tied: bool, tmp_path: Path) -> None:
    options = options | ({"nvme": str(tmp_path)} if "nvme" in options.values() else {})
    for left, shards, plain, found in run_ranks(leaves_shards, ranks, options, apart, tied):
        assert 0 < left <= shards
        assert found == plain - 2 * left, "two backwards bring what is left no more"


def test_another_graph_or_a_step_in_between_lets_go_of_them() -> None:
    for found in run_ranks(with_others_in_between, 2, FAR):
        assert found == [0, 0, 0]
