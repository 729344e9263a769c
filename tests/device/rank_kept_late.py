"""Full parameters that stay gathered for their backward, and full gradients that stay until the step, within caps of the device.

On one of several ranks.
"""

from __future__ import annotations

import late
import torch
from capped_run import Run, least_for

import zinf_compile

SIZES = {"bucket": "16KiB", "tile": "1MiB", "activations": "keep"}


def within_caps(rank: int, size: int, name: str) -> list[tuple[int, int, int]]:
    """Return for caps between the least and all of it the cap, the bytes held at the peak, and those of a step from others."""
    plain = Run(name, {**SIZES, "reshard_after_forward": True})
    plain.peak()
    expected = zinf_compile.full_state_dict(plain.model)
    del plain
    least = least_for(name, SIZES)
    found = []
    for part in (0, 1, 2, 4, 8, 32):
        run = Run(name, {**SIZES, "device_memory": least + least * part // 16})
        with late.delays(0.0005, seed=rank + part):
            peak = run.peak()
        received = zinf_compile.stats(run.model)["links"]["from ranks"]["bytes_last_step"]
        for key, value in zinf_compile.full_state_dict(run.model).items():
            assert torch.equal(value, expected[key]), f"{key}, {part} of 16 more"
        found.append((least + least * part // 16, peak, received))
        del run
    assert late.defects() == [], late.defects()
    return found


def whole_gradients_within_caps(rank: int, size: int, name: str) -> list[tuple[int, int]]:
    """Reduce at the step, after two backwards, under the least cap and more; return each cap and the bytes at the peak."""
    options = {**SIZES, "reduce_grads": "step"}
    least = least_for(name, options)
    expected: dict[str, torch.Tensor] = {}
    found = []
    for more in (0, least // 8, least):
        run = Run(name, {**options, "device_memory": least + more})
        with late.delays(0.0005, seed=rank + more):
            found.append((least + more, run.peak()))
        state = zinf_compile.full_state_dict(run.model)
        expected = expected or state
        assert all(torch.equal(value, expected[key]) for key, value in state.items()), more
        del run
    assert late.defects() == [], late.defects()
    return found
