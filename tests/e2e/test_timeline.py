"""A step as it ran over its plan: recording, the page, the line of `report_steps`, and plans made again from measured costs."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_page import Page
from models import TiedWords, loss_of, tokens
from rank_planners import train_on_a_slow_drive
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.backend.replan import FIRST, MEASURED
from zinf_compile.errors import OptionError
from zinf_compile.plan.compared_page import lane_rows
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

AWAY = {"compute": "fx", "params": "nvme", "grads": "nvme", "optimizer": "nvme", "bucket": 300}


class Training:
    """A model and its optimizer, two micro-batches a step."""

    def __init__(self, **options: Any) -> None:
        self.model = TiedWords()
        self.model.compile(backend=BACKEND, options={**AWAY, **options})
        self.optimizer = adamw(self.model.parameters())

    def forward_backward(self) -> None:
        for number in range(2):
            loss_of(self.model(*tokens(number))).backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("apart", [False, True])
def test_a_recorded_step_is_drawn_over_its_plan(apart: bool, tmp_path: Path) -> None:
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        training = Training(nvme=tmp_path, planner="greedy")
        training.step()
        training.forward_backward()
        page, events = tmp_path / "step.html", tmp_path / "step.json"
        recording = zinf_compile.timeline(training.model, page)
        training.optimizer.step()
        assert not recording.done, "its forward ran before"
        zinf_compile.timeline(training.model, events)
        lines: list[str] = []
        stop = zinf_compile.report_steps(training.model, every=1, write=lines.append)
        for _ in range(3):
            training.step()
        stop()
        training.step()
    assert recording.done
    record, planned = recording.record, recording.planned
    assert record is not None
    assert planned is not None
    assert [run.program.partition(" of ")[0] for run in record.graphs] == ["forward", "backward"] * 2
    regions = {(span.run, span.region) for span in record.of("compute")}
    assert len(regions) == planned.problem.count, "each region of the plan ran once"
    moved = ["nvme to host", "host to nvme", *(["host to device", "device to host"] if apart else [])]
    assert {"compute", "update", *moved} <= {span.lane for span in record.spans}
    assert {row.lane for row in lane_rows(recording.measured, planned.timeline)} >= {"compute", "update", *moved}
    for span in record.spans:
        assert span.end >= span.start
        assert span.start < record.seconds
    links = zinf_compile.stats(training.model)["links"]
    for link in moved:
        for kind in ("busy_s", "idle_s", "exposed_s"):
            assert links[link][kind] >= 0.0
            assert links[link][f"{kind}_last_step"] >= 0.0
        assert links[link]["busy_s"] > 0.0
        assert links[link]["predicted_busy_s"] > 0.0
    bound = recording.bound()
    assert bound is not None
    assert 0 < bound.seconds <= planned.timeline.seconds * (1 + 1e-6)
    drawn = Page(page.read_text())
    assert not drawn.open
    classes = [attributes.get("class") for _, attributes in drawn.tags]
    assert classes.count("measured") > classes.count("planned") > 2
    assert classes.count("memory") == 1 + apart
    found = json.loads(events.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in found if event["name"] == "process_name"} == {"measured", "planned"}
    assert len(lines) == 3
    assert all(" s, bound by " in line for line in lines)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_saved_values_that_leave_are_planned(tier: str, tmp_path: Path) -> None:
    """Where nothing else moves, the plan moves as many bytes over each link as the step did."""
    near = dict.fromkeys(("params", "grads", "optimizer"), "device")
    options = {"compute": "fx", "planner": "greedy", "activations": tier, **near}
    options |= {"nvme": tmp_path} if tier == "nvme" else {}
    with simulating(SimulatedDevice()):
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
        call, optimizer = torch.compile(model, backend=BACKEND, options=options), adamw(model.parameters())

        def step() -> None:
            for rows in (512, 512):
                call(torch.ones(rows, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        recording = zinf_compile.timeline(model)
        step()
        links = zinf_compile.stats(model)["links"]
    planned = recording.planned
    assert planned is not None
    local, value = planned.plan.local, planned.problem.value
    out = sum(value[row.name].bytes for row in local.stores if row.source == "device")
    back = sum(value[row.name].bytes for row in local.fetches if row.to == "device")
    assert out == links["device to host"]["bytes_last_step"] > 0
    assert back == links["host to device"]["bytes_last_step"] > 0


def test_nothing_is_kept_when_nobody_records(tmp_path: Path) -> None:
    training = Training(nvme=tmp_path)
    with pytest.raises(OptionError, match="no parameter of this TiedWords is partitioned; call it after the first"):
        zinf_compile.timeline(training.model)
    training.step()
    with pytest.raises(OptionError, match=r"form='svg' .* accepted: html, perfetto"):
        zinf_compile.timeline(training.model, form="svg")
    with pytest.raises(OptionError, match=r"can't be written to .*No such file or directory"):
        zinf_compile.timeline(training.model, tmp_path / "no" / "step.html")
    for file in ("", b"step.html", "a\0b.html", 3):
        with pytest.raises(OptionError, match=r"can't be written to .*; accepted: a file's name, or None"):
            zinf_compile.timeline(training.model, file)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"every=0 is no number of steps; accepted: 1, 2"):
        zinf_compile.report_steps(training.model, every=0)
    with pytest.raises(OptionError, match=r"write='log' can't be called; accepted: a function of one text"):
        zinf_compile.report_steps(training.model, write="log")  # type: ignore[arg-type]
    recording = zinf_compile.timeline(training.model)
    with pytest.raises(OptionError, match="is not over: train on"):
        _ = recording.measured
    training.step()
    assert recording.planned is None
    assert "was not planned: option planner" in recording.note
    own = next(p for p in training.model.parameters())._zinf_unit.context  # type: ignore[attr-defined]
    assert own.lanes.meter.recorder is None
    assert own.memory.ledger.watch is None


def test_a_drive_that_is_slower_than_assumed_is_planned_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, *_ = train_on_a_slow_drive(0, 1, str(tmp_path), False)
    torch.compiler.reset()
    zinf_compile.reset()
    with caplog.at_level(logging.INFO, logger="zinf_compile"):
        losses, changes, *_ = train_on_a_slow_drive(0, 1, str(tmp_path), True)
    assert losses == plain, "a plan changes no bit"
    said = [record.message for record in caplog.records]
    assert any("nvme to host moves" in line and "times slower; plans are made again" in line for line in said)
    (text,) = [line for line in said if line.startswith(f"planned again after step {FIRST + MEASURED}")]
    assert "forward of graph" in text
    assert text in changes
