"""Checkpoints of DeepSpeed 0.19, loaded without it: values, moments, step counts and settings, to the bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_model import CASES, FOLDER, adamw, build, expected

import zinf_compile
from zinf_compile.checkpoint.foreign import ForeignCheckpoint, ForeignTensor, Span
from zinf_compile.checkpoint.torch_archive import TorchArchive
from zinf_compile.errors import CheckpointError


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_stages_are_loaded(case: str, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    optimizer = adamw(model)
    frozen = build().frozen.weight
    extra = zinf_compile.load(FOLDER / case, model, optimizer)
    there = expected(case)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert torch.equal(parameter, there[f"fp32.{name}"].to(dtype)), name
        state = optimizer.state[parameter]
        assert torch.equal(state["step"], torch.tensor(2.0))
        for each in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[each], there[f"{each}.{name}"].to(state[each].dtype)), name
    saved = torch.float16 if case.endswith("fp16") else torch.bfloat16
    assert torch.equal(model.frozen.weight, frozen.to(saved).to(dtype))
    assert torch.equal(model.seen, torch.arange(3.0, dtype=dtype))
    assert model.head.weight is model.words.weight
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.01, 0.1), (0.01, 0.0)]
    assert (extra["epoch"], extra["names"], extra["global_steps"]) == (3, ["a", "b"], 2)


def test_the_folder_of_one_checkpoint_is_taken_too() -> None:
    model = build()
    zinf_compile.load(FOLDER / "stage2-fp16" / "step2", model)
    assert torch.equal(model.words.weight, expected("stage2-fp16")["fp32.words.weight"])


def test_the_pickles_and_wanted_elements_are_read_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    fill = TorchArchive.fill

    def counting(self: TorchArchive, into: torch.Tensor, offset: int) -> None:
        read.append(into.nbytes)
        fill(self, into, offset)

    monkeypatch.setattr(TorchArchive, "fill", counting)
    model = build()
    zinf_compile.load(FOLDER / "stage3-bf16", model)
    values = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    steps = 2 * 4  # of two groups
    assert sum(read) == values + model.frozen.weight.nbytes // 2 + model.seen.nbytes + steps, "no moments, no padding"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a checkpoint that a test may spoil."""
    shutil.copytree(FOLDER / "stage2-bf16", tmp_path / "saved")
    return tmp_path / "saved"


def refused(folder: Path, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Load what can't be; return the message. Nothing may have changed."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        zinf_compile.load(folder, model, optimizers)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not any(optimizer.state for optimizer in optimizers)
    return str(caught.value)


def test_a_missing_rank_is_named(copied: Path) -> None:
    (copied / "step2" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "lacks the files of ranks [0]" in refused(copied, build())
    (copied / "step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "type of up.bias: torch.bfloat16 in the checkpoint, torch.float32 in the model" in refused(copied, build())
    zinf_compile.load(copied, model := build(), dtype=torch.float32)  # from the model's states beside, in 16 bits
    assert torch.equal(model.up.bias, expected("stage2-bf16")["fp32.up.bias"].bfloat16().float())


def test_a_missing_last_rank_is_noticed(copied: Path) -> None:
    (copied / "step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "of 1 ranks, 2 have written it" in refused(copied, build())


def test_models_in_parallel_parts_are_sent_to_the_converter(copied: Path) -> None:
    step = copied / "step2"
    (step / "mp_rank_00_model_states.pt").rename(step / "mp_rank_01_model_states.pt")
    assert "ds_to_universal" in refused(copied, build())


@pytest.mark.parametrize("tag", ["../saved", "..", "", "none", "/tmp", "a\0b"])
def test_latest_names_a_folder_beside_it(tag: str, copied: Path) -> None:
    (copied / "latest").write_text(tag)
    assert "latest names" in refused(copied, build())


def test_files_cut_off_are_damaged(copied: Path) -> None:
    path = copied / "step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-700])
    assert f"{path} is no file of torch.save, or was not written to its end" in refused(copied, build())


def test_another_model_is_refused_as_a_whole() -> None:
    model = build()
    model.up = torch.nn.Linear(5, 4)
    model.added = torch.nn.Parameter(torch.zeros(2))
    said = refused(FOLDER / "stage3-fp16", model)
    assert "missing: added" in said
    assert "shape of up.weight: [3, 5] in the checkpoint, [4, 5] in the model" in said


def test_another_optimizer_is_refused() -> None:
    model = build()
    assert "optimizer is a one with exp_avg, exp_avg_sq in the checkpoint, SGD is given" in refused(
        FOLDER / "stage1-bf16", model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    one_group = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert "2 groups of parameters in the checkpoint, 1 are given" in refused(FOLDER / "stage1-bf16", model, one_group)


@pytest.mark.parametrize("case", CASES)
def test_changed_bytes_are_refused_or_are_values(case: str, tmp_path: Path) -> None:
    numbers = random.Random(case)
    for number in range(10):
        folder = tmp_path / str(number)
        shutil.copytree(FOLDER / case, folder)
        path = numbers.choice(sorted(folder.rglob("*.pt")))
        content = bytearray(path.read_bytes())
        for _ in range(numbers.choice([1, 2, 5])):
            content[numbers.randrange(min(len(content), 2200))] = numbers.choice([*b".R0a\xff\0", numbers.randrange(256)])
        path.write_bytes(content)
        model = build()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            zinf_compile.load(folder, model, adamw(model))
        except CheckpointError:  # and nothing else
            torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_fragment_beyond_a_partition_is_damage(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0), tmp_path / "flat.pt")
    archive = TorchArchive(tmp_path / "flat.pt")
    for start, numel, said in [(4, 3, "beyond the 6 elements"), (-1, 3, "beyond"), (0, 2, "2 of the 3 elements of \\[3\\]")]:
        found = ForeignCheckpoint(tmp_path, {"w": ForeignTensor((3,), [Span(archive.value, start, numel)])})
        with pytest.raises(CheckpointError, match=f"w: .*{said}"):
            found.check()
    archive.close()
