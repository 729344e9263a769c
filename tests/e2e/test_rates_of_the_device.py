"""Without a machine's profile, what leaves the device follows from how fast its link is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capped_blocks import VALUE, WORDS, Run, keep_all, least, machine, same

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating


def decided(options: dict[str, Any], rate: float | None) -> tuple[Run, dict[str, int]]:
    with simulating(SimulatedDevice(bytes_per_s=rate)):
        run = Run(options)
        run.step()
        found = zinf_compile.stats(run.model)["activations"]
    return run, {word: found.get(word, 0) for word in ("keep", "recompute", "host")}


def test_over_a_slow_link_values_are_made_again_and_over_a_fast_one_they_move(tmp_path: Path) -> None:
    with simulating(SimulatedDevice()):
        cap = least({**WORDS, "activations": "keep"}) - 4 * VALUE
    options = {**WORDS, "device_memory": cap}
    expected = keep_all()
    for rate, taken, other in ((None, "host", "recompute"), (1e12, "host", "recompute"), (1e7, "recompute", "host")):
        run, found = decided(options, rate)
        assert found[taken] > 0 == found[other]
        assert same(run, expected)
    file = machine(tmp_path / "machine.json", link=1e12)
    _, found = decided({**options, "machine": str(file)}, 1e7)
    assert found["host"] > 0 == found["recompute"], "a profile says all"
