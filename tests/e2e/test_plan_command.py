"""`zinf plan`, from the target to its text, JSON, timeline and page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_page import Page
from torch import nn

from zinf_compile.cli.main import main
from zinf_compile.cli.models import DEEP, TARGETS, Deep, Example
from zinf_compile.errors import BudgetError
from zinf_compile.plan.plan import Plan, Shared
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.planners.just_in_time import just_in_time
from zinf_compile.plan.profile import find_profile
from zinf_compile.plan.table import in_seconds

COMMAND = ["plan", "mlp", "--machine", "h100", "--world", "2", "--nvme", "4x"]


def test_several_budgets_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, events = tmp_path / "p.html", tmp_path / "p.json"
    budgets = ["--device-memory", "16MiB,1GiB,100KiB", "--host-memory", "4GiB"]
    status = main([*COMMAND, *budgets, "--json", "--html", str(page), "--perfetto", str(events)])
    found = json.loads(capsys.readouterr().out)
    assert status == 1
    tight, roomy, none = found["budgets"]
    assert [each["fits"] for each in found["budgets"]] == [True, True, False]
    assert none["least"]["device"] > 100 << 10
    assert main([*COMMAND, "--device-memory", str(none["least"]["device"]), "--host-memory", "4GiB"]) == 0
    for each in (tight, roomy):
        assert each["step"] >= each["bound"] * (1 - 1e-6)
        assert each["peak"]["device"] <= each["budgets"]["device"]
        assert each["tokens_per_second"] == pytest.approx(2 * 8 / each["step"])
        Plan.from_json(json.dumps(each["plan"]))
    assert roomy["step"] <= tight["step"]
    body = page.read_text()
    drawn = Page(body)
    assert not drawn.open
    assert "src=" not in body
    assert "http" not in body
    classes = [attributes.get("class") for tag, attributes in drawn.tags if tag == "svg"]
    assert classes.count("lanes") == 2
    assert classes.count("memory") == 4
    assert sum(attributes.get("class") == "cap" for _, attributes in drawn.tags) == 4
    least = re.search(r"It does not fit\. The least that does[^:]*: device ([\d.]+) MiB\.<", body)
    assert least is not None, "a budget that is enough is not named"
    assert none["least"]["device"] <= float(least[1]) * 2**20 <= 1.001 * none["least"]["device"]
    assert f"step {in_seconds(roomy['step'])}, bound {in_seconds(roomy['bound'])} by " in body
    assert "0.000 s" not in body
    names = {event["name"] for event in json.loads(events.read_text())["traceEvents"]}
    assert "bytes on device" in names


def test_the_least_that_is_named_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, which rounds it."""

    def wide() -> Example:
        return nn.Sequential(nn.Linear(8192, 10500, bias=False), nn.Linear(10500, 64, bias=False)), (torch.zeros(8, 8192),)

    monkeypatch.setitem(TARGETS, "wide", wide)
    command = ["plan", "wide", "--machine", "h100", "--device-memory"]
    assert main([*command, "20MiB"]) == 1
    least = capsys.readouterr().out.strip().rpartition("device ")[2]
    assert main([*command, least.replace(" ", "")]) == 0
    assert main([*command, f"{float(least.removesuffix(' GiB')) * 0.99}GiB"]) == 1


def test_a_model_of_which_nothing_is_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Eager(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    monkeypatch.setitem(TARGETS, "nothing", lambda: (Eager(3, 4), (torch.zeros(2, 3),)))
    assert main(["plan", "nothing", "--machine", "h100"]) == 2
    assert "target 'nothing': nothing of the model was compiled" in capsys.readouterr().err


def test_text_and_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--device-memory", "1GiB", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "by ranks" in text
    assert "tokens/s on all ranks" in text
    numel = 2 * 512 * 2048
    assert f"{numel * (4 + 4 + 8) / 2 / 1e6:,.1f} MB" in text
    assert "model states, ZeRO-3" in text


class Deeper(nn.Module):
    """So many linear layers with an activation, between two others; `forward(x)` returns the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 32)
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.last(x).square().mean()


def deep(layers: int = 9) -> Example:
    return Deeper(layers), (torch.zeros(8, 64),)


def test_copied_blocks_give_the_plan_of_traced_ones(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(TARGETS, "deep", deep)
    monkeypatch.setitem(TARGETS, "shallow", lambda: deep(6))
    budgets = ["--machine", "h100", "--world", "4", "--device-memory", "1MiB", "--options", '{"bucket": "64KiB"}']

    def planned(*arguments: str) -> dict[str, Any]:
        assert main(["plan", *arguments, *budgets, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    traced = planned("deep")
    assert traced["blocks"] is None
    copied = planned("shallow", "--blocks", "layers=9")
    monkeypatch.setitem(DEEP, "deep", Deep(deep, "layers", 9))
    by_itself = planned("deep")
    assert by_itself["blocks"] == copied["blocks"] == {"name": "layers", "count": 9, "traced": 6}
    for key in ("step", "bound", "busy", "peak", "tokens_per_second"):
        assert copied["budgets"][0][key] == pytest.approx(traced["budgets"][0][key], rel=1e-9), key
        assert by_itself["budgets"][0][key] == copied["budgets"][0][key], key
    assert planned("deep", "--micro-batches", "2")["blocks"] is None
    assert planned("deep", "--blocks", "layers=4")["blocks"] == {"name": "layers", "count": 4, "traced": 4}
    assert main(["plan", "deep", *budgets]) == 0
    assert "6 of 9 blocks of layers traced; the others are planned as copies of the middle one" in capsys.readouterr().out


def test_blocks_that_differ_by_their_options_are_all_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small parameters of several blocks are in one unit: these have no period that the traced ones show."""
    monkeypatch.setitem(TARGETS, "deep", deep)
    monkeypatch.setitem(DEEP, "deep", Deep(deep, "layers", 9))
    command = ["plan", "deep", "--machine", "h100", "--world", "4", "--options", '{"bucket": "8MiB"}']
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] is None
    assert main([*command, "--blocks", "layers=9"]) == 2
    assert "several blocks are gathered at once, in one region: a bucket is larger" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["layers", "layers=0", "=3", "layers=x", "layers=²", "layers=1000001"])
def test_what_is_no_number_of_blocks_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, "--blocks", text])
    assert (
        f"'{text}' is no number of blocks; accepted: LIST=N, such as layers=126, with N from 1 to 1,000,000"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("text", ["²", "x", "1025", "-1x", "1.5"])
def test_what_is_no_number_of_drives_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, f"--nvme={text}"])
    assert f"'{text}' is not a number of drives; accepted: 1x, 4x, ... to 1024x; 0 for none" in capsys.readouterr().err


def test_a_file_that_is_full_takes_nothing_from_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--machine", "h100", "--perfetto", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "tokens/s" in said.out
    assert said.err == "zinf: '/dev/full' is not written (No space left on device)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "h1000"], "machine 'h1000' is no shipped profile"),
        (["--machine", "h100", "--options", "[]"], "--options is a list; accepted: an object"),
        (["--machine", "h100", "--html", "none/page.html"], "'none/page.html': its folder does not exist; accepted: a file in"),
        (["--machine", "h100", "--perfetto", "none/trace.json"], "'none/trace.json': its folder does not exist; accepted"),
        (
            ["--machine", "h100", "--options", '{"device_memory": "1GiB"}'],
            "option device_memory is an argument of `zinf plan`: give --device-memory",
        ),
        (["--machine", "h100", "--options", '{"planner": "greedy"}'], "give --planner in its place"),
        (["--machine", "h100", "--options", '{"activations": "host"}'], "option activations='host' is not planned by"),
        (
            ["--machine", "h100", "--nvme", "0x", "--options", '{"optimizer": "nvme"}'],
            "option optimizer='nvme' needs drives of a known speed",
        ),
        (["--machine", "h100", "--html", "."], "'.' is a folder; accepted: a file in one"),
        (["--machine", "h100", "--blocks", "layers=6"], "accepted: a list of blocks, of which this model has none"),
        (["--machine", "h100", "--html", "/proc/page.html"], "'/proc/page.html' can't be written"),
        (["--machine", "h100", "--options", '{"nvme": "."}'], "option nvme is an argument of `zinf plan`: give --nvme 1x in its"),
        (
            ["--machine", "h100", "--options", '{"update": "nvme"}'],
            "option update='nvme' is not known; accepted: 'host', 'device'",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_words_of_options_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = {"params": "host", "grads": "device", "optimizer": "nvme"}
    assert main([*COMMAND, "--json", "--options", json.dumps(words)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["budgets"]
    homes = found["plan"]["local"]["homes"]
    assert [set(homes[kind].values()) for kind in ("params", "grads", "states")] == [{"host"}, {"device"}, {"nvme"}]
    assert found["written"] > 0


def test_a_target_that_takes_arguments_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "torch.nn:Linear", "--machine", "h100"]) == 2
    assert "target 'torch.nn:Linear' takes arguments (missing a required argument: 'in_features')" in capsys.readouterr().err


def test_an_illegal_plan_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a planner with a defect: it gathers nothing."""
    monkeypatch.setitem(PLANNERS, "just_in_time", lambda problem: dataclasses.replace(just_in_time(problem), shared=Shared()))
    assert main([*COMMAND, "--device-memory", "1GiB", "--planner", "just_in_time"]) == 2
    printed = capsys.readouterr()
    assert "is illegal" in printed.err
    assert "tokens/s" not in printed.out


def test_a_bound_that_contradicts_a_legal_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(problem: object, **settings: object) -> None:
        raise BudgetError("no plan fits")

    monkeypatch.setattr("zinf_compile.cli.plan.lower_bound", refuse)
    assert main([*COMMAND, "--device-memory", "1GiB"]) == 2
    assert "no bound is found for a step that has a legal plan; please report it" in capsys.readouterr().err


def test_this_machine_is_measured_and_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    assert main(["doctor", "--profile", str(file)]) == 0
    profile = find_profile(str(file))
    assert profile.host_is_device
    assert profile.flops_per_second["float32"] > 1e9
    capsys.readouterr()
    assert main(["plan", "mlp", "--machine", str(file), "--device-memory", "1GiB"]) == 0
    assert "by compute" in capsys.readouterr().out
    assert main(["doctor", "--profile", str(tmp_path / "no" / "mine.json")]) == 2
    assert "accepted: a file in one that does" in capsys.readouterr().err
