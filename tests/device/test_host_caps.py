"""Host memory beside the device is never over its cap: training works within the smallest that is named, and any larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capped_run import Run
from capped_stack import named_by

import zinf_compile
from zinf_compile.errors import BudgetError

SIZES = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB"}

HOMES = {
    "parameters and states on a drive": {"params": "nvme", "grads": "host", "optimizer": "nvme"},
    "parameters on a drive": {"params": "nvme", "grads": "host", "optimizer": "host"},
    "states on a drive": {"params": "host", "grads": "host", "optimizer": "nvme"},
    "gradients on a drive": {"params": "host", "grads": "nvme", "optimizer": "nvme"},
}


def trained(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the parameters after three steps of two micro-batches, and the most host memory that was held meanwhile."""
    run = Run("wide", options)
    for _ in range(3):
        run.step()
    zinf_compile.synchronize()
    memory = next(run.model.parameters())._zinf_unit.context.memory  # type: ignore[union-attr]
    return zinf_compile.full_state_dict(run.model), memory.host_ledger.total()[1]


@pytest.mark.parametrize("homes", HOMES)
def test_any_cap_works_from_the_one_that_is_named(homes: str, tmp_path: Path) -> None:
    """Copies of the forward may still read host memory when the backward asks for more: it waits for them, and is not refused."""
    options = {**SIZES, **HOMES[homes], "nvme": str(tmp_path)}
    expected, most = trained(options)
    with pytest.raises(BudgetError, match="bytes of host memory") as refused:
        trained({**options, "host_memory": 1})
    least = named_by(str(refused.value), "host_memory")
    with pytest.raises(BudgetError):
        trained({**options, "host_memory": least - 1})
    for cap in (least, least + (1 << 16), 3 * least // 2, 2 * least, 5 * least):
        values, peak = trained({**options, "host_memory": cap})
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}; {most:,} without one"
        for name, value in values.items():
            assert torch.equal(value, expected[name]), f"{name} under a cap of {cap:,}"
