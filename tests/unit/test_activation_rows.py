"""What benchmarks/activations.py computes from what it measured."""

from __future__ import annotations

from typing import Any

import pytest
from paths import ROOT


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _activation_rows  # noqa: PLC0415  (which is no part of the package)

    return _activation_rows


@pytest.mark.parametrize("most", [4, 16, 19])
@pytest.mark.parametrize("longest", range(20))
def test_the_longest_is_found_with_few_trials(rows: Any, longest: int, most: int) -> None:
    tried: list[int] = []

    def fits(length: int) -> bool:
        assert length % 10 == 0
        assert 0 < length <= 10 * most
        tried.append(length)
        return length <= 10 * longest

    assert rows.search(fits, step=10, most=10 * most) == 10 * min(longest, most)
    assert len(tried) == len(set(tried)) <= 9


def case(**other: float) -> dict[str, Any]:
    kept = [{"peer": "keep", "step_s": 3.0}]
    return {"rows": kept, "keep_cap": 150, "cap": 50, "saved": 200, "bytes_per_s": 1.0, **other}


@pytest.mark.parametrize(
    ("rate", "again"),
    [
        pytest.param(100.0, 0.0, id="all moves beside compute"),
        pytest.param(30.0, 0.35, id="what moves takes as long as the forward"),
        pytest.param(1e-9, 0.5, id="half runs again"),
    ],
)
def test_the_bound_mixes_moving_and_making_again(rows: Any, rate: float, again: float) -> None:
    part = rows.NEEDED_AGAIN
    assert part == pytest.approx(0.8)
    assert rows.least_seconds(case(bytes_per_s=rate)) == pytest.approx(3.0 + part * again, rel=2e-3)
