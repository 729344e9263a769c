"""The code of docs/write-a-planner.md runs, and its assertions hold."""

from __future__ import annotations

import re
from typing import Any

from pages import TEXTS
from paths import ROOT


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[ROOT / "docs" / "write-a-planner.md"], re.DOTALL)
    assert len(blocks) == 4
    found: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "write-a-planner.md", "exec"), found)
    assert found["plan"].planner == "fetch_ahead"
    early = found["one_region_early"](found["problem"])
    assert found["simulate"](found["problem"], early).seconds == 8.0
    assert not found["verify"](found["problem"], early)
