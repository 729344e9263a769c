"""Options: what is accepted, and what each refusal says; through torch.compile the model stays as it was."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from torch import nn
from training import BACKEND, assert_same_models

from zinf_compile import OptionError
from zinf_compile.config import Config
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.ir.tiers import Placement

REFUSED: list[tuple[dict[Any, Any], str]] = [
    ({"buckt": "1MiB"}, r"unknown option 'buckt' .*accepted: compute, bucket, .*did you mean 'bucket'\?"),
    ({"proces_group": None}, r"unknown option 'proces_group' .*did you mean 'process_group'\?"),
    ({"zzz": 1}, r"unknown option 'zzz' for backend 'zero_infinity'; accepted: compute, bucket"),
    ({3: 4}, "unknown option 3 "),
    ({"compute": "eager"}, "compute='eager' .*accepted: 'fx', 'inductor'"),
    ({"compute": None}, "compute=None .*accepted: 'fx'"),
    ({"mode": "reduce-overhead"}, "mode='reduce-overhead' asks for CUDA graphs.*buffers that move.*accepted: 'default', 'max-"),
    ({"mode": "max-autotune"}, "mode='max-autotune' asks for CUDA graphs.*; accepted: 'default', 'max-autotune-no-cudagraphs'"),
    ({"mode": "fast"}, "mode='fast' is not known to backend 'zero_infinity'; accepted: 'default', 'max-autotune-no-cudagraphs'"),
    ({"mode": None}, "mode=None is not known"),
    (
        {"mode": "max-autotune-no-cudagraphs", "compute": "fx"},
        "compute='fx' uses none of them; omit the mode or set compute",
    ),
    ({"on_refusal": "warn"}, "on_refusal='warn' is not known; accepted: 'fx', 'error'"),
    ({"optimizer": "disk"}, "optimizer='disk' is not known; accepted: 'auto', 'device', 'host', 'nvme'"),
    ({"params": "disk"}, "params='disk' is not known; accepted: 'auto', 'device', 'host', 'nvme'"),
    ({"grads": None}, "grads=None is not known; accepted: 'auto', 'device', 'host', 'nvme'"),
    ({"params": "nvme"}, "params='nvme' needs a drive: add nvme='/path"),
    ({"grads": "nvme", "optimizer": "nvme"}, "grads='nvme' needs a drive: add nvme='/path"),
    ({"reduce_grads": "always"}, "reduce_grads='always' is not known; accepted: 'backward', 'step'"),
    (
        {"reduce_grads": "step", "grads": "host"},
        "option reduce_grads='step' keeps full gradients on the device, and grads='host' asks for another tier",
    ),
    ({"reshard_after_forward": "no"}, "reshard_after_forward='no' is not known; accepted: True, False, 'auto'"),
    ({"reshard_after_forward": 1}, "reshard_after_forward=1 is not known; accepted: True, False, 'auto'"),
    ({"reshard_after_backward": 0}, "reshard_after_backward=0 is not known; accepted: True, False"),
    (
        {"reshard_after_backward": False, "reshard_after_forward": True},
        "option reshard_after_backward=False keeps full parameters on the device until the step, and reshard_after_forward=True "
        "lets go of them behind each forward: omit one of the two",
    ),
    ({"update": "gpu"}, "update='gpu' is not known; accepted: 'host', 'device'"),
    ({"master": "float16"}, "master='float16' is not known; accepted: 'float32'"),
    ({"device_memory": "lots"}, "device_memory='lots' is not a size; accepted: a positive number of bytes or text such as"),
    ({"host_memory": 0}, "host_memory=0 is not a size"),
    ({"optimizer": "nvme"}, "optimizer='nvme' needs a drive: add nvme='/path"),
    (
        {"nvme": ".", "params": "device", "grads": "device", "optimizer": "host"},
        "nvme='.' is given, but no tier uses it: set params, grads or optimizer to 'nvme' or 'auto'",
    ),
    (
        {"optimizer": "nvme", "nvme": "/missing"},
        "nvme: '/missing' is no folder that this process may write to; make it, or name another",
    ),
    ({"optimizer": "nvme", "nvme": [".", "/proc/self/maps"]}, "nvme: '/proc/self/maps' is no folder"),
    ({"optimizer": "nvme", "nvme": 5}, "nvme=5 is not a path; accepted: a folder, or a list of folders"),
    ({"bucket": -1}, "bucket=-1 is not a size; accepted: a positive number of bytes or text such as '32MiB'"),
    ({"bucket": 0}, "bucket=0 is not a size"),
    ({"bucket": "0"}, "bucket=0 is not a size"),
    ({"bucket": "1.5"}, "bucket='1.5' is not a size"),
    ({"bucket": True}, "bucket=True is not a size"),
    ({"bucket": 1.5}, "bucket=1.5 is not a size"),
    ({"bucket": "3 parsec"}, "bucket='3 parsec' is not a size; .*units: B, KiB, MiB"),
    ({"bucket": "0B"}, "bucket=0 is not a size"),
    ({"timeout_s": 0}, "timeout_s=0 is not a positive number of seconds"),
    ({"timeout_s": True}, "timeout_s=True is not a positive number"),
    ({"timeout_s": "60"}, "timeout_s='60' is not a positive number"),
    ({"timeout_s": float("nan")}, "timeout_s=nan is not a positive number"),
    ({"timeout_s": float("inf")}, "timeout_s=inf is not a positive number"),
    ({"compute_shape": 3}, "compute_shape=3 is not known; accepted: a dict of piece_numel, chunk_bytes, worth_bytes"),
    ({"compute_shape": {"tile": 1}}, r"compute_shape=\{'tile': 1\} is not known; accepted: a dict of .* are options"),
    ({"compute_shape": {"chunk_bytes": 0}}, "compute_shape: chunk_bytes=0 is not a size; accepted: a positive whole number"),
    ({"compute_shape": {"piece_numel": True}}, "compute_shape: piece_numel=True is not a size"),
    ({"compute_shape": {"worth_bytes": 1.5}}, "compute_shape: worth_bytes=1.5 is not a size"),
    ({"machine": 4}, "machine=4 is not known; accepted: a profile's name, or the path of its file"),
    ({"compute_shape": {"token_tile": 0}}, "compute_shape: token_tile=0 is not a size; accepted: a positive number of bytes"),
    ({"compute_shape": {"token_tile": "64 tokens"}}, "token_tile='64 tokens' is not a size; accepted: .* such as '32MiB'"),
    ({"process_group": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "a group that this rank is no member of"),
    ({"process_group": 3}, "process_group is a int; accepted: what torch.distributed.new_group returns"),
    ({"mesh": 3}, "mesh is int; accepted: a one-dimensional DeviceMesh"),
    ({"process_group": 3, "mesh": 3}, "process_group and mesh exclude each other"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_a_bad_option_is_named_with_what_is_accepted(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Config.from_options(options)


def test_options_are_a_mapping() -> None:
    with pytest.raises(OptionError, match=r"options=\['bucket'\] is a list; accepted: a dict of compute, bucket"):
        Config.from_options(["bucket"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"buckt": 1}}, "did you mean 'bucket'"),
        ({"options": {"bucket": "many"}}, "bucket='many' is not a size"),
        ({"options": ["bucket"]}, "accepted: a dict"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' asks for CUDA graphs"),
        ({"mode": "max-autotune"}, "mode='max-autotune' asks for CUDA graphs"),
        ({"mode": "lite"}, "mode='lite' is not known to backend 'zero_infinity'; accepted: 'default', 'max-autotune-no-cuda"),
    ],
    ids=["name", "value", "list", "reduce-overhead", "max-autotune", "lite"],
)
def test_torch_compile_raises_the_refusal_itself_and_leaves_the_model(settings: dict[str, Any], message: str) -> None:
    model = Mlp()
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=BACKEND, **settings)
    with pytest.raises(OptionError, match=message) as raised:
        compiled(*vectors(0))
    assert isinstance(raised.value, ValueError)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_same_models(twin, model)


def test_a_mode_is_an_option_that_torch_compile_passes_beside_the_others() -> None:
    assert Config.from_options(None, mode="default") == Config()
    assert Config.from_options({"bucket": 1}, mode=(mode := "max-autotune-no-cudagraphs")) == Config(bucket=1, mode=mode)


def test_defaults_are_accepted_and_frozen() -> None:
    config = Config.from_options(None)
    assert config == Config.from_options({}) == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket = 1  # type: ignore[misc]


def test_sizes_are_bytes_or_text_with_a_unit() -> None:
    assert [parse_bytes(size, option="bucket") for size in (7, "7B", "2KiB", "1.5 MiB", "3GB")] == [
        7,
        7,
        2048,
        3 * 2**19,
        3 * 10**9,
    ]


def test_what_ranks_agree_on_does_not_depend_on_how_a_size_is_written() -> None:
    assert Config(bucket="1MiB").signature() == Config(bucket=2**20).signature()
    assert Config(bucket="1MiB").signature() != Config(bucket="1MB").signature()


def test_the_default_bucket_is_no_larger_than_a_tile() -> None:
    assert Config().shape().bucket_bytes == 32 << 20
    assert Config(device_memory="1GiB").shape().bucket_bytes == 32 << 20
    assert Config(device_memory="100MiB").shape().bucket_bytes == 16 << 20
    assert Config(device_memory="3MiB").shape().bucket_bytes == 1 << 20  # without tiles
    assert Config(tile="5MiB").shape().bucket_bytes == 5 << 20
    assert Config(device_memory="100MiB", bucket="32MiB").shape().bucket_bytes == 32 << 20


def test_the_compute_shape_is_made_of_declared_options_and_agreed_on() -> None:
    shape = Config(compute="fx", bucket="1KiB", device_memory="8MiB", compute_shape={"chunk_bytes": 7}).shape()
    assert (shape.bucket_bytes, shape.tile_bytes, shape.chunk_bytes) == (1024, 2 << 20, 7)
    assert "fx, bucket 1,024 bytes, tile 2,097,152 bytes" in shape.text()
    assert shape == Config(compute="fx", bucket=1024, tile="2MiB", compute_shape={"chunk_bytes": 7}, params="host").shape()
    assert Config(compute_shape={"chunk_bytes": 7}).signature() != Config().signature()
    pieces = Config(compute_shape={"piece_numel": 96})
    assert pieces.shape().piece_numel == pieces.placement().piece_numel == 96
    assert "piece 96 elements" in pieces.shape().text()
    assert pieces.signature() != Config().signature()
    slices = Config(compute_shape={"token_tile": "1KiB"})
    assert slices.shape() == Config(compute_shape={"token_tile": 1024}).shape()
    assert "slice of tokens 1,024 bytes" in slices.shape().text()
    assert slices.shape().values()["token_tile"] == 1024
    assert "token_tile" not in Config().shape().values()
    assert "slice" not in Config().shape().text()
    assert slices.signature() != Config().signature()
    assert Config().placement().piece_numel == Config().shape().piece_numel == 4 << 20


@pytest.mark.parametrize(
    ("numel", "piece"), [(0, 1 << 18), (10**6, 1 << 18), (1 << 24, 1 << 19), (124_000_000, 1 << 21), (10**12, 4 << 20)]
)
def test_small_models_have_small_pieces(numel: int, piece: int) -> None:
    assert Config().for_shards(numel).placement().piece_numel == piece
    assert Config(compute_shape={"piece_numel": 96, "chunk_bytes": 7}).for_shards(numel).shape().piece_numel == 96


@pytest.mark.parametrize(
    ("cap", "piece"),
    [("1MiB", 1 << 18), ("256MiB", 1 << 19), ("511MiB", 1 << 19), ("512MiB", 1 << 20), ("2GiB", 4 << 20), ("80GiB", 4 << 20)],
)
def test_pieces_leave_room_for_three_chunks_under_a_cap(cap: str, piece: int) -> None:
    assert Config(device_memory=cap).for_shards(10**10).placement().piece_numel == piece
    assert Config(device_memory=cap).for_shards(10**6).placement().piece_numel == 1 << 18
    pinned = Config(device_memory=cap, compute_shape={"piece_numel": 96})
    assert pinned.for_shards(10**10).placement().piece_numel == 96


def test_more_ranks_than_one_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Mlp()
    compiled = torch.compile(model, backend=BACKEND)
    with pytest.raises(OptionError, match=r"WORLD_SIZE is 2 .* call torch.distributed.init_process_group\(\)"):
        compiled(*vectors(0))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_each_rank_may_have_a_drive_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme3").mkdir()
    monkeypatch.setenv("LOCAL_RANK", "3")
    config = Config.from_options({"optimizer": "nvme", "nvme": [tmp_path / "nvme{local_rank}", str(tmp_path)]})
    assert config.placement() == Placement(optimizer="nvme", nvme=(str(tmp_path / "nvme3"), str(tmp_path)))
