"""Names and types on the way in, and values of other programs: by `load`, and by `partition` of a model on meta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_model import CASES, FOLDER, adamw, build, expected
from safetensors.torch import save_file
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint.converted_files import new_key
from zinf_compile.checkpoint.intake import lossy
from zinf_compile.checkpoint.save import save
from zinf_compile.errors import CheckpointError, UnsupportedModelError


class Source(nn.Module):
    """A model whose names and types differ from those of `Target`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor([2, 3], dtype=torch.int32))


class Target(nn.Module):
    """First and second are the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 5)
        self.first = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.second.weight
        self.factor = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("count", torch.tensor([0, 0], dtype=torch.int32))


RENAME = {"first.weight": "second.weight", "first.bias": "second.bias", "second.weight": "first.weight", "scale": "factor"}


def rename(name: str) -> str:
    """Do what `RENAME` does."""
    return RENAME.get(name, name)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Source, torch.optim.Optimizer]:
    """Return a model that has taken a step, saved by `save`, `torch.save` and as safetensors."""
    torch.manual_seed(1)
    model = Source()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save(tmp_path / "zinf", model, optimizer, extra={"step": 4})
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}
    torch.save(state, tmp_path / "torch.pt")
    save_file({k: v.clone() for k, v in model.state_dict().items() if k != "tied.weight"}, tmp_path / "model.safetensors")
    return model, optimizer


def assert_is(target: nn.Module, model: Source, dtype: torch.dtype = torch.float32) -> None:
    """Assert that a target has the values of a source."""
    state = zinf_compile.full_state_dict(target)
    assert {name: t.dtype for name, t in state.items() if name != "count"} == dict.fromkeys(state.keys() - {"count"}, dtype)
    for name, value in model.state_dict().items():
        assert torch.equal(state[rename(name)], value.to(dtype) if value.is_floating_point() else value), name


@pytest.mark.parametrize("renaming", [RENAME, rename], ids=["a mapping", "a function"])
@pytest.mark.parametrize("path", ["zinf", "torch.pt"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_load_renames_and_converts(
    renaming: Any, path: str, dtype: torch.dtype | None, source: tuple[Source, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = source
    target = Target().to(dtype or torch.float32)
    assert target.count.dtype == torch.int32
    mine = torch.optim.AdamW(list(target.parameters()), lr=0.5)
    order = [rename(name) for name, _ in model.named_parameters()]
    mine = torch.optim.AdamW([target.get_parameter(name) for name in order], lr=0.5)
    extra = zinf_compile.load(tmp_path / path, target, mine, dtype=dtype, rename=renaming)
    assert extra == {"step": 4}
    assert_is(target, model, dtype or torch.float32)
    assert mine.param_groups[0]["lr"] == 0.1
    for name, parameter in model.named_parameters():
        theirs, ours = optimizer.state[parameter], mine.state[target.get_parameter(rename(name))]
        assert torch.equal(theirs["step"], ours["step"])
        if parameter.dim():
            assert torch.equal(theirs["exp_avg_sq"].to(ours["exp_avg_sq"].dtype), ours["exp_avg_sq"])


@pytest.mark.parametrize("path", ["zinf", "torch.pt", "model.safetensors"])
@pytest.mark.parametrize("options", [{}, {"params": "nvme", "optimizer": "nvme"}], ids=["memory", "a drive"])
def test_partition_renames_and_converts(
    path: str, options: dict[str, Any], source: tuple[Source, torch.optim.Optimizer], tmp_path: Path
) -> None:
    options = {**options, "nvme": str(tmp_path)} if options else {}
    with torch.device("meta"):
        target = Target().to(torch.bfloat16)
    zinf_compile.partition(target, checkpoint=tmp_path / path, dtype=torch.bfloat16, rename=RENAME, **options)
    assert_is(target, source[0], torch.bfloat16)
    with torch.device("meta"):
        again = Source()
    zinf_compile.partition(again, checkpoint=tmp_path / path, **options)
    torch.testing.assert_close(zinf_compile.full_state_dict(again), dict(source[0].state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["zinf", "torch.pt"])
def test_load_onto_meta_renames_and_converts(
    path: str, dtype: torch.dtype, source: tuple[Source, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = source
    with torch.device("meta"):
        target = Target().to(dtype)
    away = {"params": "nvme", "optimizer": "nvme", "nvme": str(tmp_path)}
    target.compile(backend="zero_infinity", options={"compute": "fx", **away})
    mine = torch.optim.AdamW([target.get_parameter(rename(name)) for name, _ in model.named_parameters()], lr=0.5)
    assert zinf_compile.load(tmp_path / path, target, mine, dtype=dtype, rename=rename) == {"step": 4}
    assert_is(target, model, dtype)
    states = zinf_compile.full_optimizer_state_dict(mine)["state"]
    for number, parameter in enumerate(model.parameters()):
        found = states[number]["exp_avg"]
        assert torch.equal(found, optimizer.state[parameter]["exp_avg"].to(found.dtype)), number


class Net(nn.Module):
    """A weight whose states are of its size, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.scale = nn.Linear(30, 20), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.down(x)) * self.scale).float().square().mean()


def steps(call: Any, optimizer: torch.optim.Optimizer, count: int, dtype: torch.dtype) -> list[float]:
    losses = []
    for _ in range(count):
        loss = call(torch.ones(2, 30, dtype=dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:all 3 parameters are torch.bfloat16")
@pytest.mark.parametrize(
    ("dtype", "options", "kept"),
    [
        (torch.float64, {}, torch.float64),
        (torch.float64, {"optimizer": "nvme"}, torch.float64),
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.bfloat16, {"master": "float32"}, torch.float32),
        (torch.bfloat16, {"master": "float32", "optimizer": "nvme"}, torch.float32),
        (torch.float64, None, torch.float64),
    ],
)
def test_training_goes_on_in_another_type(
    dtype: torch.dtype, options: dict[str, Any] | None, kept: torch.dtype, tmp_path: Path
) -> None:
    """States of a parameter's type get its new one, or that of its master copy: the type in which the next step updates them."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    steps(model, optimizer, 2, torch.float32)
    zinf_compile.save(tmp_path, model, optimizer, wait=True)
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    again = Net().to(dtype)
    call: Any = again
    if options is not None:
        places = options | ({"nvme": str(tmp_path)} if "optimizer" in options else {})
        call = torch.compile(again, backend=BACKEND, options=places)
    mine = torch.optim.AdamW(again.parameters(), lr=0.5, fused=True)
    steps(call, mine, 1, dtype)
    zinf_compile.load(tmp_path, again, mine, dtype=dtype)
    for number, state in zinf_compile.full_optimizer_state_dict(mine)["state"].items():
        assert (state["exp_avg"].dtype, state["step"].dtype) == (kept, torch.float32)
        assert torch.equal(state["exp_avg"], moments[number].to(kept))
    expected = steps(model, optimizer, 3, torch.float32)
    assert steps(call, mine, 3, dtype) == pytest.approx(expected, rel=0.05 if dtype == torch.bfloat16 else 1e-5)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"rename": {"none": "a", "nothing": "b", "first.weight": "second.weight", "scale": "first.bias"}},
        [
            "rename has none, which the checkpoint has not", "rename has nothing, which",
            "first.bias and scale would both be first.bias",
            "first.weight and second.weight would both be second.weight",
        ],
    ),
    ({"rename": lambda name: "x"}, ["first.weight", "first.bias", "second.weight", "scale", "would both be x"]),
    ({"rename": lambda name: None}, ["rename makes None of scale", "rename makes None of count"]),
    (
        {"dtype": {"count": torch.float16, "scale": torch.int64, "none": torch.float32}},
        [
            "count can't go from torch.int32 to torch.float16: whole numbers beyond 2,048 would be rounded",
            "scale can't go from torch.float32 to torch.int64: fractions would be lost",
            "dtype has none, a name that no tensor of the checkpoint gets",
        ],
    ),
    (
        {"rename": {"none": "a"}, "dtype": {"count": torch.int8}},
        ["rename has none", "count can't go from torch.int32 to torch.int8: numbers out of its range would be lost"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), WRONG)
@pytest.mark.parametrize("path", ["zinf", "torch.pt", "model.safetensors"])
def test_all_that_is_wrong_is_named_at_once(
    path: str, given: dict[str, Any], said: list[str], source: tuple[Source, torch.optim.Optimizer], tmp_path: Path
) -> None:
    if path != "model.safetensors":
        target = Source()
        before = {name: value.clone() for name, value in target.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            zinf_compile.load(tmp_path / path, target, **given)
        assert all(each in str(caught.value) for each in said), str(caught.value)
        torch.testing.assert_close(dict(target.state_dict()), before, rtol=0, atol=0)
    with torch.device("meta"):
        on_meta = Source()
    with pytest.raises(CheckpointError) as caught:
        zinf_compile.partition(on_meta, checkpoint=tmp_path / path, **given)
    assert all(each in str(caught.value) for each in said), str(caught.value)
    assert all(parameter.is_meta for parameter in on_meta.parameters())


def test_names_and_types_are_of_a_checkpoint() -> None:
    with torch.device("meta"):
        model = Source()
    with pytest.raises(UnsupportedModelError, match="which are for a checkpoint"):
        zinf_compile.partition(model, rename=RENAME)


def test_without_dtype_types_must_be_the_models(source: tuple[Source, torch.optim.Optimizer], tmp_path: Path) -> None:
    for path in ("zinf", "torch.pt"):
        with pytest.raises(
            CheckpointError, match=r"type of scale: torch\.float32 in the checkpoint, torch\.float64 in the model"
        ):
            zinf_compile.load(tmp_path / path, Source().double())


@pytest.mark.parametrize("found", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "wanted", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.bool]
)
def test_lossy_is_what_changes_some_number(found: torch.dtype, wanted: torch.dtype) -> None:
    if found == torch.bool:
        extremes = torch.tensor([False, True])
    else:
        limits = torch.iinfo(found)
        extremes = torch.tensor([limits.min, limits.max, limits.max - 1, limits.min + 1], dtype=found)
    back = extremes.to(wanted).to(torch.float64 if wanted.is_floating_point else torch.int64)
    assert (lossy(found, wanted) == "") == (back.tolist() == extremes.tolist())  # Python compares whole numbers exactly


@pytest.mark.parametrize("case", CASES)
def test_partition_takes_checkpoints_of_deepspeed(case: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    zinf_compile.partition(model, checkpoint=FOLDER / case, params="nvme", optimizer="nvme", master="float32", nvme=str(tmp_path))
    state, there = zinf_compile.full_state_dict(model), expected(case)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(state[name], there[f"fp32.{name}"].bfloat16()), name
    optimizer = adamw(model)
    zinf_compile.load(FOLDER / case, model, optimizer)
    found = zinf_compile.full_optimizer_state_dict(optimizer)["state"]
    order = [name for group in optimizer.param_groups for p in group["params"] for name, q in model.named_parameters() if p is q]
    for number, name in enumerate(order):
        assert torch.equal(found[number]["master"], there[f"fp32.{name}"]), name
        assert torch.equal(found[number]["exp_avg"], there[f"exp_avg.{name}"]), name
        assert float(found[number]["step"]) == 2


def test_all_that_has_a_parameters_name_is_renamed() -> None:
    names = {"a": "b", "b": "a", "a.c": "d"}
    keys = {
        "model.a": "model.b", "model.a.c": "model.d", "gradient.b": "gradient.a", "buffer.12.a": "buffer.12.b",
        "optimizer.state.a.exp_avg": "optimizer.state.b.exp_avg", "optimizer.state.a.c.exp_avg": "optimizer.state.d.exp_avg",
        "optimizer.group.0.lr": "optimizer.group.0.lr", "extra.a": "extra.a", "random.0.host": "random.0.host",
    }  # fmt: skip
    assert {key: new_key(key, names, {"optimizer": {}}) for key in keys} == keys
