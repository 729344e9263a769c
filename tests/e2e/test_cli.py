"""What `zinf dump` prints other than text, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from zinf_compile._torch import fake_mode
from zinf_compile.cli.main import main, schedule_hash
from zinf_compile.cli.models import Llama
from zinf_compile.cli.target import load_target
from zinf_compile.cli.trace import pass_names, trace
from zinf_compile.config import Config
from zinf_compile.passes import joint_passes

SMALL = ["--world", "4", "--options", '{"bucket": "4MiB"}']


def tiny_llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a Llama of two layers."""
    model = Llama(layers=2, width=24, heads=6, kv_heads=2, hidden=40, vocabulary=50)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    return model, (tokens, tokens)


def zinf(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process and return what it prints."""
    assert main(["dump", *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(zinf(capsys, "mlp", *SMALL, "--format", "json"))
    traffic = {"units", "gathered", "reduced", "read", "copied_in", "copied_out", "written", "live"}
    assert set(found) == {"schedule_hash", "world", "device", "compute_shape", "options", "traffic", "graphs"}
    assert set(found["compute_shape"]) == {
        "bucket_bytes", "tile_bytes", "piece_numel", "chunk_bytes", "worth_bytes", "chunk_loss", "compute", "mode",
    }  # fmt: skip
    assert set(found["traffic"]) == traffic
    for graph in found["graphs"]:
        assert set(graph) == {"name", "kind", "collectives", "swaps", "traffic", "critical_path", "saved"}
        assert set(graph["traffic"]) == traffic
        assert set(graph["critical_path"]) == {"bytes", "moved", "nodes"}
        assert {key for node in graph["critical_path"]["nodes"] for key in node} == {"name", "lane", "bytes"}


def test_json_says_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(zinf(capsys, "mlp", *SMALL, "--format", "json"))
    full, moved = 4 * 512 * 2048, 3 * 512 * 512 * 4
    assert found["world"] == 4
    assert found["options"].items() >= {"bucket": "4MiB", "timeout_s": 600.0}.items()
    swapped = dict.fromkeys(("read", "copied_in", "copied_out", "written"), 0)
    assert found["traffic"] == {"units": 2, "gathered": 3 * moved, "reduced": 2 * moved, "live": 2 * full} | swapped
    forward, backward = found["graphs"]
    assert (forward["name"], forward["kind"], backward["kind"]) == ("forward of graph 0", "forward", "backward")
    assert forward["collectives"] == [
        {"operator": "all_gather", "group": 0, "unit": "up.weight", "dtype": "float32", "bytes": full, "moved": moved},
        {"operator": "all_gather", "group": 1, "unit": "down.weight", "dtype": "float32", "bytes": full, "moved": moved},
    ]
    assert backward["collectives"][1:] == [
        {"operator": "reduce_scatter", "group": 0, "unit": "down.weight", "dtype": "float32", "bytes": full, "moved": moved},
        {"operator": "reduce_scatter", "group": 1, "unit": "up.weight", "dtype": "float32", "bytes": full, "moved": moved},
    ]
    assert backward["traffic"] == {"units": 2, "gathered": moved, "reduced": 2 * moved, "live": full} | swapped


NVME = ["--options", '{"bucket": "4MiB", "params": "nvme", "grads": "nvme", "nvme": "/no/such/folder"}']


def test_json_says_what_is_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    shard = 512 * 512 * 4
    found = json.loads(zinf(capsys, "mlp", "--world", "4", *NVME, "--format", "json"))
    forward, backward = found["graphs"]
    assert found["device"] == "cpu"
    assert forward["swaps"] == [
        {"operator": "swap_in", "from": "nvme", "to": "device", "unit": "up.weight", "moved": shard},
        {"operator": "swap_in", "from": "nvme", "to": "device", "unit": "down.weight", "moved": shard},
    ]
    assert backward["swaps"][1:] == [
        {"operator": "swap_out", "from": "device", "to": "nvme", "unit": "down.weight", "moved": shard},
        {"operator": "swap_out", "from": "device", "to": "nvme", "unit": "up.weight", "moved": shard},
    ]
    assert found["traffic"].items() >= {"read": 3 * shard, "written": 2 * shard, "copied_in": 0, "copied_out": 0}.items()
    assert [(node["lane"], node["bytes"]) for node in forward["critical_path"]["nodes"][:2]] == [
        ("read", shard),
        ("gather", 3 * shard),
    ]


def test_a_device_with_memory_of_its_own_is_two_hops_away(capsys: pytest.CaptureFixture[str]) -> None:
    shown = zinf(capsys, "mlp", "--world", "4", *NVME, "--device", "cuda", "--graph", "forward")
    assert re.search(r'\nread = swap_in\(up.weight, "nvme", "host", 0\) +# up.weight 1,048,576 B\n', shown)
    assert re.search(r'\ncopied = swap_in\(read, "host", "device", 0\) +# up.weight 1,048,576 B\n', shown)
    assert re.search(r"units +bytes gathered +.* bytes read +bytes copied in +bytes copied out +bytes written +largest", shown)
    assert "copied in" not in zinf(capsys, "mlp", "--world", "4", *NVME)
    assert "bytes read" not in zinf(capsys, "mlp", *SMALL, "--device", "cuda")
    found = json.loads(zinf(capsys, "mlp", *NVME, "--device", "cuda", "--format", "json"))
    assert found["device"] == "cuda"
    lanes = set(re.findall(r"fillcolor=(\w+)", zinf(capsys, "mlp", *NVME, "--device", "cuda", "--format", "dot")))
    assert len(lanes) == 7


def test_the_hash_says_nothing_of_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    alone = zinf(capsys, "mlp", *SMALL, "--hash")
    assert alone == zinf(capsys, "mlp", "--world", "4", *NVME, "--hash")
    assert alone == zinf(capsys, "mlp", "--world", "4", *NVME, "--device", "cuda", "--hash")


def test_json_says_in_what_type_a_unit_moves(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(zinf(capsys, "dump_targets:half_mlp", "--world", "2", "--format", "json"))
    forward, backward = (graph["collectives"] for graph in found["graphs"])
    assert forward[0].items() >= {"unit": "0.weight", "dtype": "bfloat16", "bytes": 2 * 24 * 48, "moved": 24 * 48}.items()
    assert backward[-1].items() >= {"operator": "reduce_scatter", "dtype": "float32", "bytes": 4 * 24 * 48}.items()


def test_the_critical_path_is_in_the_table_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(zinf(capsys, "mlp", *SMALL, "--format", "json"))
    full, moved, x, hidden = 4 * 512 * 2048, 3 * 512 * 512 * 4, 4 * 8 * 512, 4 * 8 * 2048
    path = found["graphs"][0]["critical_path"]
    assert path["nodes"][0] == {"name": "gather", "lane": "gather", "bytes": moved}
    assert path["moved"] == moved  # the second gather travels beside compute
    assert path["bytes"] == moved + 2 * full + 2 * (x + hidden)
    table = zinf(capsys, "mlp", *SMALL)
    both = sum(graph["critical_path"]["bytes"] for graph in found["graphs"])
    assert re.search(rf"forward of graph 0 .* {path['bytes']:,}\n", table)
    assert re.search(rf"all .* {both:,}\n", table)


def test_json_and_dot_show_the_graphs_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(zinf(capsys, "mlp", "--graph", "backward", "--format", "json"))
    assert [graph["kind"] for graph in found["graphs"]] == ["backward"]
    assert found["traffic"]["units"] == 2
    dot = zinf(capsys, "mlp", "--graph", "backward", "--world", "3", "--format", "dot")
    assert re.findall(r'    label="(.*)";', dot) == ["backward of graph 0, rank 0 of 3"]
    assert dot.startswith("digraph zinf {\n")
    assert dot.endswith("\n}\n")


def test_it_says_where_a_run_has_no_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    said = "a run on one rank with these options leaves the parameters as they are"
    assert said in zinf(capsys, "mlp", "--options", '{"compute": "fx"}')
    assert said not in zinf(capsys, "mlp", "--options", '{"params": "device"}')
    assert said not in zinf(capsys, "mlp", "--options", '{"compute": "fx"}', "--world", "2")


def test_the_hash_is_that_of_the_text_and_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    alone = zinf(capsys, "mlp", *SMALL, "--hash")
    assert re.fullmatch(r"[0-9a-f]{16}\n", alone)
    assert zinf(capsys, "mlp", *SMALL).endswith(f"schedule hash: {alone}")
    assert json.loads(zinf(capsys, "mlp", *SMALL, "--format", "json"))["schedule_hash"] == alone.strip()
    assert zinf(capsys, "mlp", "--hash") != alone


def test_diff_shows_what_a_pass_changed_in_each_graph(capsys: pytest.CaptureFixture[str]) -> None:
    shown = zinf(capsys, "mlp", *SMALL, "--diff", "prefetch")
    moved = [line for line in shown.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert [line.split("  ")[0] for line in moved] == [
        "+gather_1 = all_gather(down.weight, 1)",
        "-gather_1 = all_gather(down.weight, 1)",
    ]
    assert shown.startswith("--- forward of graph 0 before prefetch\n+++ forward of graph 0 after prefetch\n@@ ")
    assert shown.endswith("\n# backward of graph 0: unchanged by prefetch\n\n")


def test_diff_of_a_joint_pass_is_of_the_joint_graph(capsys: pytest.CaptureFixture[str]) -> None:
    shown = zinf(capsys, "mlp", "--diff", "recompute_unit_views")
    assert shown.startswith("--- joint forward and backward of graph 0 before recompute_unit_views\n")
    assert re.search(r"\n-permute = permute\(up.weight, \[1, 0\]\)\n", shown)
    assert re.search(r"\n\+permute = permute\(up.weight, \[1, 0\]\) +# must_recompute\n", shown)
    assert shown.count("\n--- ") == 0
    assert re.search(r"\n\+shard = reduce_scatter\(.*\) +# up.weight ", zinf(capsys, "mlp", "--diff", "insert_reduce_scatters"))


def test_an_inference_graph_never_was_a_joint_graph(capsys: pytest.CaptureFixture[str]) -> None:
    shown = zinf(capsys, "dump_targets:inference", "--diff", "insert_reduce_scatters")
    assert shown == "# no graph goes through insert_reduce_scatters\n"
    assert "all_gather(layer.weight" in zinf(capsys, "dump_targets:inference", "--diff", "insert_gathers")


@pytest.mark.thorough
def test_each_pass_starts_from_what_the_one_before_left() -> None:
    names = pass_names(Config())[len(joint_passes()) :]
    traced: dict[str, Any] = {name: trace(tiny_llama, after=name) for name in names}
    for earlier, later in itertools.pairwise(names):
        for before, after in zip(traced[earlier], traced[later], strict=True):
            assert after.before == before.text
    assert [s.text for s in traced[names[-1]]] == [s.text for s in trace(tiny_llama)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "svg"], "invalid choice: 'svg' (choose from"),
        (["--device", "tpu"], "invalid choice: 'tpu' (choose from"),
        (["--diff", "prefetches"], "pass 'prefetches' is not known; accepted: chunk_loss"),
        (["--hash", "--diff", "prefetch"], "not allowed with argument"),
        (["--after", "prefetch", "--diff", "prefetch"], "not allowed with argument"),
        (["--hash", "--format", "json"], "--hash and --format json exclude each other; accepted: --format text"),
        (["--diff", "prefetch", "--format", "dot"], "--diff and --format dot exclude each other"),
        (["--after", "prefetch", "--format", "json"], "--after and --format json exclude each other"),
    ],
)
def test_what_cannot_be_answered_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(["dump", "mlp", *arguments])
    except SystemExit as ended:  # argparse's own
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_llama_70b_has_the_published_number_of_parameters() -> None:
    with fake_mode():
        model, _ = load_target("llama-70b")()
    assert sum(parameter.numel() for parameter in model.parameters()) == 70_553_706_496


def test_a_llama_moves_each_parameter_three_times_at_most() -> None:
    model, _ = tiny_llama()
    psi = sum(p.numel() * p.element_size() for p in model.parameters())
    found = trace(tiny_llama, world_size=2)
    assert sum(s.traffic.reduced for s in found) * 2 == psi
    assert psi < sum(s.traffic.gathered for s in found) * 2 <= 2 * psi
    assert schedule_hash(found) == schedule_hash(trace(tiny_llama, world_size=8))
