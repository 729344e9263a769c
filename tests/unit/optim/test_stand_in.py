"""Stand-ins of optimizers, as threads beside the one that makes them see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zinf_compile.optim import stand_in
from zinf_compile.optim.record import all_records, record_of


def test_a_stand_in_has_its_parameters_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background looks through all optimizers, while a deferred step makes stand-ins of them."""
    parameter, shard = nn.Parameter(torch.ones(4)), torch.ones(4)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    record_of(optimizer)
    settings_of, seen = stand_in.fused_settings, []

    def look(*args: Any) -> dict[str, Any]:
        seen.append([p for each, _ in all_records() for group in each.param_groups for p in group["params"]])
        return settings_of(*args)

    monkeypatch.setattr(stand_in, "fused_settings", look)
    made, groups = stand_in.make_stand_in(optimizer, {id(parameter): [shard]}, without_members=lambda _: False)
    groups[0]["lr"] = 0.2
    del groups[0]["foreach"]
    stand_in.refresh_stand_in(optimizer, made, groups)
    for found in seen:
        assert any(each is parameter for each in found)
        assert any(each is shard for each in found)
    assert len(seen) == 2
    assert made.param_groups[0]["lr"] == 0.2
    assert "foreach" not in made.param_groups[0]
