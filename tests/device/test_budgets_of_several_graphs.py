"""Memory of models of several graphs is never over budget either, what the loop holds of the call before included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import capped_run  # noqa: F401, it finds `support`
import pytest
import torch
from broken_models import Broken, FrozenWords, LossApart, Noticing, batch_of
from named_cap import named_cap
from torch import nn

import zinf_compile
from zinf_compile.errors import BudgetError

SIZES = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB"}


def train(kind: type[nn.Module], options: dict[str, Any]) -> tuple[int, list[float]]:
    """Take two steps of two micro-batches, the last loss held while the next call runs; return the peak, and the losses."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = kind().to("late")
    call = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **SIZES, **options})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    batches = [batch_of(kind, number).to("late") for number in range(4)]
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    losses = []
    for number, batch in enumerate(batches):
        loss = call(batch)
        loss.backward()
        losses.append(loss.detach().cpu().item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    zinf_compile.synchronize()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated(), losses


@pytest.mark.parametrize("kind", [Broken, FrozenWords, LossApart, Noticing])
def test_the_device_holds_no_more_than_any_cap_allows(kind: type[nn.Module], tmp_path: Path) -> None:
    whole, expected = train(kind, {})
    options, cap = {"nvme": str(tmp_path)}, 1
    while True:
        try:
            peak, losses = train(kind, {**options, "device_memory": cap})
        except BudgetError as error:
            larger = named_cap(error)
            assert larger > cap
            cap = larger
            continue
        assert losses == expected
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}"
        if cap > whole:
            break
        cap += (whole - cap) // 3 + 100_000
