"""The dump shows what a real run does, and allocates nothing for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dump_targets
import pytest
import torch
from capturing import capturing_backend
from marks import more
from ranks import run_ranks

from zinf_compile._torch import captured_name
from zinf_compile.cli.dump_error import DumpError
from zinf_compile.cli.main import main, schedule_hash
from zinf_compile.cli.target import load_target
from zinf_compile.cli.trace import Scheduled, trace
from zinf_compile.errors import BudgetError, OptionError
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import SwapIn, SwapOut
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.system import host_limits

OPTIONS = {"bucket": "4KiB", "compute": "fx"}
NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": "/no/such/folder"}
HOST = {"params": "host", "grads": "host"}
TIERS: dict[str, dict[str, str]] = {"memory": {}, "host": HOST, "nvme": NVME}


@functools.cache
def traced(target: str, tiers: str, *, world_size: int = 1, device: str = "cpu") -> list[Scheduled]:
    """Return a dump that several tests look at."""
    return trace(getattr(dump_targets, target), options=OPTIONS | TIERS[tiers], world_size=world_size, device=device)


@pytest.mark.parametrize("compute", ["fx", more("inductor")])
def test_dump_has_the_schedule_of_a_real_run_on_one_rank(compute: str) -> None:
    options = OPTIONS | {"compute": compute}
    dumped = schedule_hash(trace(dump_targets.tiny_gpt, options=options))
    digest, lines = dump_targets.real_run(0, 1, options)
    assert len(lines) > 60
    assert dumped == digest


@pytest.mark.distributed
def test_dump_has_the_schedule_of_a_real_run_on_two_ranks() -> None:
    dumped = schedule_hash(traced("tiny_gpt", "memory", world_size=2))
    for digest, _ in run_ranks(dump_targets.real_run, 2, OPTIONS):
        assert digest == dumped


def test_another_bucket_is_another_schedule() -> None:
    hashes = {schedule_hash(trace(dump_targets.tiny_gpt, options={"bucket": size})) for size in ("2KiB", "4KiB", "1MiB")}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("device", "tiers", "hops"),
    [
        ("cpu", "nvme", {("nvme", "device")}),
        ("cpu", "host", set()),
        ("cuda", "nvme", {("nvme", "host"), ("host", "device")}),
        ("cuda", "host", {("host", "device")}),
    ],
    ids=["cpu-nvme", "cpu-host", "cuda-nvme", "cuda-host"],
)
def test_dump_has_the_swaps_of_a_real_run(device: str, tiers: str, hops: set[tuple[str, str]], tmp_path: Path) -> None:
    dumped = [step for s in traced("tiny_gpt", tiers, device=device) for step in s.program.steps]
    programs: list[Program] = []
    model, inputs = dump_targets.tiny_gpt()
    real = OPTIONS | TIERS[tiers] | ({"nvme": tmp_path} if tiers == "nvme" else {})
    with simulating(SimulatedDevice()) if device == "cuda" else contextlib.nullcontext():
        torch.compile(model, backend=capturing_backend(programs, real))(*inputs).backward()
    ran = [step for program in programs for step in program.steps]
    assert [type(step) for step in dumped] == [type(step) for step in ran]
    swaps = [step for step in dumped if isinstance(step, (SwapIn, SwapOut))]
    assert swaps == [step for step in ran if isinstance(step, (SwapIn, SwapOut))]
    assert {(step.src, step.dst) for step in swaps if isinstance(step, SwapIn)} == hops
    assert {(step.dst, step.src) for step in swaps if isinstance(step, SwapOut)} == hops


@pytest.mark.parametrize(("target", "world_size"), [("tiny_gpt", 2), more("tiny_gpt", 4), ("half_mlp", 1), more("half_mlp", 2)])
def test_where_states_live_changes_no_collective(target: str, world_size: int) -> None:
    hashes = {
        schedule_hash(traced(target, tiers, world_size=world_size, device=device))
        for device in ("cpu", "cuda")
        for tiers in TIERS
    }
    assert len(hashes) == 1


def test_memory_sets_a_limit_where_the_options_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [s.text for s in traced("tiny_gpt", "nvme")]
    monkeypatch.setattr(host_limits, "available_memory_bytes", lambda: 1000)
    assert [s.text for s in trace(dump_targets.tiny_gpt, options=OPTIONS | NVME)] == plain
    with pytest.raises(BudgetError, match="option device_memory") as caught:
        trace(dump_targets.tiny_gpt, options=OPTIONS | NVME | {"device_memory": 1, "host_memory": "1GiB"}, device="cuda")
    least = int(str(caught.value).split("the smallest that works is ")[1].split(".")[0].replace(",", ""))
    tight = OPTIONS | NVME | {"device_memory": least, "host_memory": "1GiB"}
    found = trace(dump_targets.tiny_gpt, options=tight | {"planner": "just_in_time"}, device="cuda")
    assert max(s.traffic.live for s in found) < max(s.traffic.live for s in traced("tiny_gpt", "nvme", device="cuda"))
    planned = trace(dump_targets.tiny_gpt, options=tight, device="cuda")
    assert all("plan by cached_prefetch" in s.plan for s in planned), "more is there where compute takes less"


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_each_rank_moves_its_own_shards_over_its_own_links(world_size: int) -> None:
    model, _ = dump_targets.mlp()
    shards = sum(math.ceil(p.numel() / world_size) * p.element_size() for p in model.parameters())

    def links(tiers: dict[str, str], device: str) -> list[list[int]]:
        found = [s.traffic for s in trace(dump_targets.mlp, options=tiers, world_size=world_size, device=device)]
        return [[t.read, t.copied_in, t.copied_out, t.written] for t in found]

    assert links(NVME, "cpu") == [[shards, 0, 0, 0], [shards, 0, 0, shards]]
    assert links(NVME, "cuda") == [[shards, shards, 0, 0], [shards, shards, shards, shards]]
    assert links(HOST, "cuda") == [[0, shards, 0, 0], [0, shards, shards, 0]]
    assert links(HOST, "cpu") == links({}, "cuda") == [[0] * 4] * 2


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_step_moves_three_times_the_parameters(world_size: int) -> None:
    model, _ = dump_targets.mlp()
    psi = sum(p.numel() * p.element_size() for p in model.parameters())
    found = trace(dump_targets.mlp, world_size=world_size)
    moved = sum(s.traffic.gathered + s.traffic.reduced for s in found)
    assert moved * world_size == 3 * psi * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_under_autocast_a_step_moves_twice_the_parameters(world_size: int) -> None:
    model, _ = dump_targets.half_mlp()
    psi = sum(p.numel() * p.element_size() for p in model.parameters())
    found = trace(dump_targets.half_mlp, world_size=world_size)
    assert sum(s.traffic.gathered for s in found) * world_size == psi * (world_size - 1)
    assert sum(s.traffic.reduced for s in found) * world_size == psi * (world_size - 1)
    assert found[0].traffic.live == psi / 2


def test_one_rank_moves_nothing() -> None:
    assert all(s.traffic.gathered == s.traffic.reduced == 0 for s in trace(dump_targets.mlp))


def test_padding_counts() -> None:
    (forward,) = (s for s in trace(dump_targets.broken, world_size=3) if s.name == "forward of graph 0")
    assert forward.traffic.gathered == 2 * 4 * (12 + 2)  # ceil(35/3) and ceil(5/3) elements from two peers


def test_each_graph_of_a_broken_model_is_shown() -> None:
    names = [s.name for s in trace(dump_targets.broken)]
    assert names == ["forward of graph 0", "backward of graph 0", "forward of graph 1", "backward of graph 1"]


def test_inputs_by_keyword() -> None:
    assert schedule_hash(trace(dump_targets.by_keyword)) == schedule_hash(trace(dump_targets.tiny_gpt))


@pytest.mark.parametrize("target", [dump_targets.on_meta, dump_targets.model_on_meta])
def test_a_model_on_meta_has_the_schedule_of_one_with_values(target: Callable[[], Any]) -> None:
    assert schedule_hash(trace(target, world_size=2)) == schedule_hash(trace(dump_targets.tiny_gpt, world_size=2))


def test_a_target_may_cast_its_model() -> None:
    slots = trace(dump_targets.cast)[0].program.slots.values()
    assert [(slot.name, slot.dtype) for slot in slots] == [("0.weight", torch.bfloat16), ("2.weight", torch.bfloat16)]


def test_a_model_whose_shapes_depend_on_values_is_refused() -> None:
    with pytest.raises(DumpError, match=r"the forward runs aten\.nonzero\.default, whose result depends on values"):
        trace(dump_targets.routed)


def test_inputs_on_meta_get_gradients_as_others_do() -> None:
    there, on_meta = (trace(functools.partial(dump_targets.input_that_learns, device)) for device in ("cpu", "meta"))
    assert [graph.summary for graph in there] == [graph.summary for graph in on_meta]


def test_a_tensor_on_meta_beside_parameters_is_named() -> None:
    with pytest.raises(DumpError, match=r"\(the model\) refers to a tensor on the meta device that is no parameter"):
        trace(dump_targets.list_on_meta)


def test_after_a_pass_the_graph_is_as_that_pass_left_it() -> None:
    forward = trace(dump_targets.mlp, after="insert_gathers")[0]
    assert "gather = all_gather(0.weight)" in forward.text
    assert "release" not in forward.text
    joint = trace(dump_targets.mlp, after="insert_reduce_scatters")[0]
    assert "reduce_scatter" in joint.text
    assert "all_gather" not in joint.text


@dataclasses.dataclass(frozen=True)
class Dumped:
    """What a dump printed and traced, and by how many bytes the process grew."""

    printed: str
    scheduled: list[Scheduled]
    grown_bytes: int


@pytest.fixture(scope="module")
def gpt2_small() -> Dumped:
    """Dump the backward of GPT-2 on one of four ranks, by the command, in this process."""
    scheduled: list[Scheduled] = []

    def noted(*arguments: Any, **how: Any) -> list[Scheduled]:
        scheduled.extend(trace(*arguments, **how))
        return scheduled

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys.modules[main.__module__], "trace", noted)
        assert main(["dump", "gpt2-small", "--world", "4", "--graph", "backward"]) == 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Dumped(printed.getvalue(), scheduled, grown)


def test_no_weight_is_allocated(gpt2_small: Dumped) -> None:
    model_bytes = sum(slot.bytes for slot in gpt2_small.scheduled[0].program.slots.values())
    assert model_bytes == 124_439_808 * 4
    assert gpt2_small.grown_bytes < model_bytes / 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt2-smal", "accepted: MODULE:FUNCTION, FILE.py:FUNCTION, or one of mlp, gpt2-small"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("./no_such_file.py:f", "importing ./no_such_file.py raised FileNotFoundError"),
        (".dump_targets:mlp", r"'\.dump_targets' is no module's name; accepted: as in package\.module:function, or file\.py:"),
        ("dump_targets:nothing", "dump_targets has no 'nothing'"),
        ("dump_targets:NOT_A_FUNCTION", "is a int; accepted: a function"),
    ],
)
def test_unknown_targets_are_named(spec: str, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        load_target(spec)


@pytest.mark.parametrize("machine", ["h100", "here"])
def test_the_critical_path_takes_seconds_on_a_machine(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "dump_targets:mlp", "--world", "2", "--machine", machine]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,), (last,) = [[line for line in lines if line.startswith(name)] for name in ("graph ", "all ")]
    assert head.endswith("critical path s")
    assert float(last.split()[-1]) > 0


def test_a_target_may_be_in_a_file_beside_its_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "widths_of_it.py").write_text("WIDTH = 24\n")
    (tmp_path / "its_script.py").write_text(
        "from __future__ import annotations\nimport dataclasses, torch\nfrom widths_of_it import WIDTH\n"
        "@dataclasses.dataclass\nclass Shape:\n    width: int = WIDTH\n"
        "def build():\n    return torch.nn.Linear(Shape().width, 3), torch.zeros(2, WIDTH)\n"
    )
    model, _ = load_target(f"{tmp_path / 'its_script.py'}:build")()
    assert model.in_features == 24
    (tmp_path / "its_bug.py").write_text("import torch\ntorch.no_such_thing\n")
    with pytest.raises(DumpError, match=r"importing .*its_bug.py raised AttributeError: .*no_such_thing.*its_bug.py:2"):
        load_target(f"{tmp_path / 'its_bug.py'}:build")


def test_a_model_of_which_nothing_is_compiled_is_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "dump_targets:nothing_to_compile"]) == 2
    assert "nothing of the model was compiled. Dynamo left its forward to eager code" in capsys.readouterr().err


def test_errors_of_the_users_code_are_told_as_such() -> None:
    with pytest.raises(DumpError, match=r"the target raised KeyError: 'layers' \(.*dump_targets\.py:\d+\)"):
        trace(dump_targets.its_own_bug)
    with pytest.raises(DumpError, match=r"the forward, called with the target's inputs, raised TypeError: .*takes 2 positional"):
        trace(dump_targets.more_inputs)


def test_bad_requests_are_named() -> None:
    with pytest.raises(DumpError, match=r"returned a int; accepted: \(model, example inputs\)"):
        trace(dump_targets.not_a_model)
    with pytest.raises(DumpError, match=r"pass 'prefetches' is not known; accepted: .*prefetch"):
        trace(dump_targets.mlp, after="prefetches")
    with pytest.raises(OptionError, match="params='nvme' needs a drive: add nvme="):
        trace(dump_targets.mlp, options={"params": "nvme"})
    with pytest.raises(OptionError, match=r"unknown option 'buckets'.*did you mean 'bucket'"):
        trace(dump_targets.mlp, options={"buckets": 1})


def test_after_a_dump_the_process_is_as_before() -> None:
    trace(dump_targets.mlp, world_size=4)
    assert not torch.distributed.is_initialized()
    digest, _ = dump_targets.real_run(0, 1, OPTIONS)
    assert digest == dump_targets.real_run(0, 1, OPTIONS)[0]


def test_the_command_prints_graphs_table_and_hash(gpt2_small: Dumped) -> None:
    assert "# backward of graph 0, rank 0 of 4" in gpt2_small.printed
    assert "# forward of graph 0" not in gpt2_small.printed
    assert "# h.11.up.weight 9,437,184 B" in gpt2_small.printed
    assert re.search(r"^# h\.\d+ … h\.\d as h\.1\d: \d+ lines$", gpt2_small.printed, re.MULTILINE)
    assert "bytes reduce-scattered" in gpt2_small.printed
    assert "schedule hash: " in gpt2_small.printed


def test_the_package_is_run_as_the_command() -> None:
    command = [sys.executable, "-m", "zinf_compile", "dump", "mlp", "--world", "4", "--graph", "backward"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# backward of graph 0, rank 0 of 4" in done.stdout
    assert "# forward of graph 0" not in done.stdout
    assert "schedule hash: " in done.stdout
    assert "compute shape: inductor (default), bucket 33,554,432 bytes, tile none, piece 262,144 elements" in done.stdout


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['h']._modules['0']._parameters['weight']", "h.0.weight"),
        ("L['self'].router.__dict__['_modules']['classifier']._parameters['weight']", "router.classifier.weight"),
        ("L['x']", "x"),
    ],
)
def test_names_are_the_users(source: str, name: str) -> None:
    placeholder = torch.fx.Graph().placeholder("argument")
    placeholder.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=source))
    assert captured_name(placeholder) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2-small", "--options", "{bucket}"], "--options is not JSON"),
        (["gpt2-small", "--options", "[]"], "--options is a list"),
        (["gpt2-small", "--world", "0"], "'0' is not a number from 1 to"),
        (["gpt2-small", "--world", "3000000000"], "'3000000000' is not a number from 1 to 1,000,000"),
        (["gpt3"], "target 'gpt3' is not known"),
        (["mlp", "--options", '{"device_memory": 1, "params": "device"}'], "the smallest that works is"),
    ],
)
def test_the_command_refuses_with_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["dump", *arguments]))
    assert ended.value.code == 2
    assert message in (said := capsys.readouterr().err)
    assert "TORCHDYNAMO" not in said
