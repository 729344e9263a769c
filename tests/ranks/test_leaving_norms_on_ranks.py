"""Norms of gradients on several ranks are taken behind their reduction, before they leave: with the bits of reading them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from marks import more
from rank_leaving_norms import STEPS, clipped
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),
]
HOST = dict.fromkeys(("params", "grads", "optimizer"), "host")
PARAMETERS = 6


@pytest.mark.parametrize(
    ("ranks", "options", "apart"),
    [
        (2, HOST | {"tile": "1KiB"}, True),
        (3, HOST | {"grads": "nvme"}, True),
        more(2, HOST, True),
        more(2, dict.fromkeys(HOST, "nvme"), False),
        more(4, HOST | {"planner": "cached_prefetch"}, True),
    ],
)
def test_no_gradient_is_read_back_from_the_second_step_on(
    ranks: int, options: dict[str, Any], apart: bool, tmp_path: Path
) -> None:
    if "nvme" in options.values():
        options = options | {"nvme": str(tmp_path)}
    losses = set()
    for seen, known, read in run_ranks(clipped, ranks, options, apart):
        losses.add(tuple(seen[1::2][:STEPS]))
        assert (known, read) == (PARAMETERS * (STEPS - 1), PARAMETERS)
    assert len(losses) == 1, "all ranks have the same norms"
