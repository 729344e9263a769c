"""Units of one model that are cut over different sets of ranks: each set has process groups of its own, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_groups import two_halves
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_two_halves_and_all(tmp_path: Path) -> None:
    results = run_ranks(two_halves, 4, str(tmp_path))
    for rank, found in enumerate(results):
        first = rank // 2 * 2
        assert found["gathered"] == {"half": [100.0 * (rank // 2) + n for n in range(7)], "all": [float(n) for n in range(7)]}
        half, whole = (sum(n * n for n in found["gathered"][name]) ** 0.5 for name in ("half", "all"))
        assert found["norms"] == pytest.approx([whole, half, whole]), "each over the ranks of its own unit"
        assert found["full"] == found["gathered"]
        assert found["numbers"] == [first, first + 1]
        assert found["everyone"] == [0, 1, 2, 3]
        assert found["shared"] == first
        for (name, _), made in found["created"].items():
            ranks, size = ((first, first + 1), 2) if name == "half" else ((0, 1, 2, 3), 4)
            tiles = made["tiled"][2]
            assert tiles > 1
            assert made == {
                "tiled": (True, 120 // size, tiles, ranks),
                "uneven": (True, -(-7 // size), 0, ranks),
                "number": (True, 1, 0, ranks),
            }
        assert (found["made"], found["later"]) == (3, 0), "one to agree, one for gathers, one for reductions"
