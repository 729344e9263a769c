"""A step is recorded by the device's own times: those of events, not those at which the host issues."""

from __future__ import annotations

import itertools
from pathlib import Path

import late
import torch
from late_training import PLACEMENTS, Training

import zinf_compile

LONGEST_S = 0.004


def test_times_are_those_of_events(tmp_path: Path) -> None:
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training("late", {**PLACEMENTS["host"], "planner": "one_ahead", "bucket": "16KiB"})
    batches = [training.batches(step, 2) for step in range(5)]
    training.step(batches[0])
    page = tmp_path / "step.html"
    recording = zinf_compile.timeline(training.model, page)
    torch.accelerator.synchronize()
    late.clear()
    with late.delays(LONGEST_S, seed=3):
        training.step(batches[1])
        torch.accelerator.synchronize()
    record, planned = recording.record, recording.planned
    assert record is not None
    assert planned is not None
    works = [work for log in late.logs().values() for work in log]
    for lane, name in (("host to device", "copy to device"), ("device to host", "copy to host")):
        spans = record.of(lane)
        assert spans
        inside = [work for work in works if work.name == name and work.bytes > 100]
        assert sum(span.end - span.start for span in spans) >= sum(work.end - work.start for work in inside)
    regions = {(span.run, span.region) for span in record.of("compute")}
    assert len(regions) == planned.problem.count
    ordered = [span for span in record.spans if span.lane == "compute"]
    assert all(before.end <= after.start for before, after in itertools.pairwise(ordered)), "on one stream"
    products = sum("mm" in work.name for work in works)
    busy = sum(span.end - span.start for span in ordered)
    assert busy >= products * LONGEST_S / 8, "delays are the device's: the host issues in no time"
    assert "measured / planned" in page.read_text()
    links = zinf_compile.stats(training.model)["links"]
    assert links["host to device"]["busy_s_last_step"] > 0.0
    training.step(batches[2])
