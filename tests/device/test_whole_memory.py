"""`device_memory` is the whole memory: what the device's allocator held at the peak, everything counted, beside the cap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late
import pytest
import torch
from capped_run import NEAR, Run, least_for
from compute_models import MODELS
from late_training import on_drives
from named_cap import named_cap

from zinf_compile.errors import BudgetError


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_memory_is_within_the_cap_and_near_it(name: str) -> None:
    least = least_for(name, {"activations": "keep"})
    held = Run(name, {"device_memory": least, "activations": "keep"}).peak()
    assert 0.9 * least <= held <= least
    with pytest.raises(BudgetError):
        Run(name, {"device_memory": least - 1, "activations": "keep"}).peak()


HOST = dict.fromkeys(NEAR, "host")
DRIVE = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


@pytest.mark.parametrize("name", ["gpt", "experts"])
@pytest.mark.parametrize("places", [HOST, {**HOST, "update": "device"}, DRIVE], ids=["host", "updated on the device", "drive"])
def test_with_states_elsewhere_it_stays_within_caps(name: str, places: dict[str, Any], tmp_path: Path) -> None:
    options = {**on_drives(places, tmp_path), "bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}}
    least = least_for(name, options)
    for cap in (least, least * 5 // 4):
        assert Run(name, {**options, "device_memory": cap}).peak() <= cap
    with pytest.raises(BudgetError):
        Run(name, {**options, "device_memory": least - 1}).peak()


def test_forwards_without_their_backwards_are_refused_before_they_run() -> None:
    least = least_for("wide", {})
    run = Run("wide", {"device_memory": least})
    run.step()
    kept = [run.call(*run.batch)]
    with pytest.raises(BudgetError, match="activations and results of earlier calls") as refused:
        kept.append(run.call(*run.batch))
    torch.stack(kept).sum().backward()  # what was there is still good
    run.optimizer.step()
    works = named_cap(refused.value)
    del kept, refused
    for cap in (works, works - 1):
        del run
        run = Run("wide", {"device_memory": cap})
        run.step()
        first = run.call(*run.batch)
        if cap < works:
            with pytest.raises(BudgetError):
                run.call(*run.batch)
        else:
            torch.accelerator.reset_peak_memory_stats()
            (first + run.call(*run.batch)).backward()
            torch.accelerator.synchronize()
            assert torch.accelerator.max_memory_allocated() <= cap
        first = None


def test_tensors_of_the_user_count() -> None:
    least = least_for("wide", {})
    run = Run("wide", {"device_memory": least})
    run.step()
    taken = torch.empty(1 << 20, dtype=torch.uint8, device="late")
    with pytest.raises(BudgetError, match="are taken by others"):
        run.step()
    del taken
    run.step()
    del run
    taken = torch.empty(1 << 20, dtype=torch.uint8, device="late")
    more = least_for("wide", {})
    assert more == least + taken.nbytes
    assert Run("wide", {"device_memory": more}).peak() <= more
    assert late.account().peak >= taken.nbytes
