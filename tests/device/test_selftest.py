"""`zinf doctor --gpu-selftest` on the device: what it finds, and how it says so. Speeds are whatever this machine has."""

from __future__ import annotations

import sys

import late
import pytest
import torch

from zinf_compile.cli import gpu_selftest, selftest_training, selftest_transfers
from zinf_compile.cli.main import main
from zinf_compile.cli.selftest_check import Finding, NotHere

LATE = torch.device("late:0")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_transfers, "COPIED_BYTES", 1 << 18)
    monkeypatch.setattr(selftest_transfers, "COPIES", 3)


def test_the_report_is_one_block_with_versions_and_a_verdict_for_each_check() -> None:
    def broken(device: torch.device) -> Finding:
        raise ValueError("no such thing")

    def elsewhere(device: torch.device) -> Finding:
        raise NotHere("not on this one")

    chosen = [
        ("good", lambda device: Finding(device == LATE, "1 of 1")),
        ("bad", lambda device: Finding(False, "0 of 1 " + "long " * 40)),
        ("broken", broken),
        ("elsewhere", elsewhere),
    ]
    text, passed = gpu_selftest.report(chosen=chosen)
    assert not passed
    lines = text.splitlines()
    assert lines[0] == "zinf doctor --gpu-selftest"
    assert f"torch {torch.__version__}" in lines[1]
    assert lines[2].startswith("late (late:0), ")
    assert "ok    good: 1 of 1" in lines
    assert "-     elsewhere: not on this one" in lines
    assert any(line.startswith("FAIL  broken: ValueError: no such thing (test_selftest.py:") for line in lines)
    assert max(map(len, lines[3:])) <= 110
    assert lines[-1].startswith("1 passed, 2 failed, 1 not for this device, in ")


def test_gradients_a_peak_within_the_cap_and_a_second_model() -> None:
    for check in (selftest_training.gradients, selftest_training.peak, selftest_training.second_model):
        found = check(LATE)
        assert found.passed, found.text
    assert late.defects() == []


def test_a_peak_beyond_the_cap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train = selftest_training.train
    monkeypatch.setattr(selftest_training, "train", lambda device, options: train(device, {"params": "device"}))
    assert not selftest_training.peak(LATE).passed


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train = selftest_training.train

    def off(device: torch.device, options: object, **others: object) -> selftest_training.Trained:
        found = train(device, options, **others)
        return found if options is None else found._replace(values=[value + 1e-7 for value in found.values])

    monkeypatch.setattr(selftest_training, "train", off)
    found = selftest_training.gradients(LATE)
    assert not found.passed
    assert "is not eager PyTorch's" in found.text


def test_locked_memory_and_its_refusal() -> None:
    assert selftest_transfers.locked(LATE).passed
    with late.pinned_limit(0):
        found = selftest_transfers.locked(LATE)
    assert not found.passed
    assert "ulimit -l" in found.text


def test_copies_are_timed_beside_a_plain_one_and_beside_compute() -> None:
    with late.delays(0.001, seed=1):
        speed, overlap = selftest_transfers.speed(LATE), selftest_transfers.overlap(LATE)
    assert speed.text.count("GB/s, a plain copy") == 2
    assert "copies end at" in overlap.text
    assert late.defects() == []


@pytest.mark.parametrize("expands", [True, False])
def test_the_program_with_expandable_segments(
    expands: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the process of its own runs on a GPU: bits as eager PyTorch's, and whether a segment can expand."""
    monkeypatch.setattr(sys, "argv", ["-c", str(LATE)])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": False}, {"is_expandable": expands}, {}])
    exec(selftest_training._IN_SEGMENTS, {})
    expected = selftest_training.train(LATE, None).digest()
    assert capsys.readouterr().out.split()[-2:] == [expected, str(expands)]
    assert late.defects() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs on it")
def test_a_process_with_expandable_segments_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nothing of `late`, and there is nothing else to train on."""
    monkeypatch.setattr(selftest_training, "digest", lambda device: "0a1b")
    found = selftest_training.expandable_segments(torch.device("cuda", 0))
    assert not found.passed
    assert found.text.startswith("the process ended with status 1: ")
    assert found.text.splitlines()[-1].startswith("RuntimeError: "), "what ended it, in its own words"


@pytest.mark.thorough
def test_all_of_it(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    main(["doctor", "--gpu-selftest", "--nvme", str(tmp_path)])
    text = capsys.readouterr().out
    assert "ok    placements, bit for bit: 27 of 27 as eager PyTorch" in text
    assert "-     expandable_segments: no setting of late" in text
    assert late.defects() == []
