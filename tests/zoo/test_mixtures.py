"""The models of the zoo with some saved values kept, some on a drive and some made again: the bits of eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_saved_values import Mixed

from .architectures import ARCHITECTURES
from .building import case
from .train import train_without_fallback

FAST = ["gpt_neox", "t5"]


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ARCHITECTURES])
def test_an_architecture_trains_alike(name: str, tmp_path: Path) -> None:
    row = ARCHITECTURES[name]
    before = Mixed.moved
    seed = list(ARCHITECTURES).index(name)
    train_without_fallback(
        case(name), as_aot_eager=bool(row.as_aot_eager), fullgraph=not row.breaks, nvme=str(tmp_path), seed=seed
    )
    assert Mixed.moved > before
