"""A folder announced for checkpoints: the dry run knows before the first step what a save takes, and reserves it."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint.rank_files import RankFiles
from zinf_compile.checkpoint.reserved_space import ReservedSpace, reserved_in
from zinf_compile.errors import CheckpointError, OptionError

AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Small(nn.Module):
    """A tied weight, a frozen one, a number, one element, one that no graph uses, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words, self.down = nn.Embedding(23, 40, dtype=dtype), nn.Linear(40, 13, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(13, 3, dtype=dtype), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(40, 13, dtype=dtype).t())
        self.scale, self.one = nn.Parameter(torch.ones((), dtype=dtype)), nn.Parameter(torch.ones(1, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        y = torch.tanh(self.down(x) + x @ self.turned.t()) @ self.frozen * self.scale * self.one
        self.mean.add_(y.detach().float().mean((0, 1)))
        return (x @ self.words.weight.t()).float().square().mean() + y.float().square().mean()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def backward(compiled: Any) -> None:
    """Give all trained parameters gradients, also the one that no graph uses."""
    compiled(torch.randint(23, (4, 6))).backward()
    compiled.unused.grad = torch.ones_like(compiled.unused)


def space_of(folder: Path) -> ReservedSpace:
    space = reserved_in(folder)
    assert space is not None
    return space


def sizes_in(save: Path) -> list[int]:
    """Return the sizes of the files of tensors."""
    return [path.stat().st_size for path in sorted(save.glob("*.safetensors"))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OPTIMIZERS: dict[str, Make] = {
    "adamw, amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
}
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "states": {"optimizer": "nvme"},
    "all away, in tiles": {**AWAY, "tile": 256},
    "master copies": {"optimizer": "nvme", "master": "float32"},
    "master copies in memory": {"master": "float32"},
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("memory", "adamw, amsgrad"),
        ("all away, in tiles", "sgd with momentum"),
        ("master copies", "adamw, amsgrad"),
        *(
            pytest.param(place, kind, marks=pytest.mark.thorough)
            for place, kind in [
                ("memory", "adagrad"), ("memory", "sgd"), ("states", "rmsprop"), ("states", "adamw, amsgrad"),
                ("states", "adagrad"), ("all away, in tiles", "sgd"), ("master copies in memory", "rmsprop"),
            ]
        ),
    ],
)  # fmt: skip
def test_sizes_are_known_before_the_first_step(place: str, kind: str, drive: Path, tmp_path: Path) -> None:
    """To the byte: those of files with gradients, and without."""
    torch.compiler.reset()
    folder = tmp_path / "new" / "saves"
    options = {**PLACES[place], "compute_shape": {"piece_numel": 96}, "checkpoint": folder}
    options |= {"nvme": str(drive)} if "nvme" in options.values() else {}
    model = Small(torch.bfloat16 if "master" in options else torch.float32)
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = OPTIMIZERS[kind](trained(model))
    backward(compiled)
    optimizer.step()
    expected = space_of(folder)._sizes
    assert names(folder) == [], "space is held by files without a name"
    backward(compiled)
    found = sizes_in(zinf_compile.save(folder, model, optimizer, wait=True))
    assert expected == found, "with gradients"
    assert space_of(folder).bytes >= sum(path.stat().st_size for path in (folder / "save-00000001").iterdir())


def test_keep_and_the_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zinf_compile")
    model = Small()
    options = {"checkpoint": str(tmp_path), "checkpoint_keep": 2}
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    zinf_compile.save(tmp_path, model)
    backward(compiled)
    optimizer.step()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("checkpoints of")]
    form = (
        r"checkpoints of Small, AdamW in \S+: 2 checkpoints to keep and one that is written take ([\d,]+) bytes of the drive, "
        r"([\d,]+) each, ([\d,]+) of them for gradients that no step has applied yet; 1 of them there, ([\d,]+) "
        r"bytes reserved for the rest, [\d,]+ still free"
    )
    match = re.fullmatch(form, line)
    assert match, line
    taken, each, gradients, reserved = (int(text.replace(",", "")) for text in match.groups())
    assert (taken, reserved) == (3 * each, 2 * each)
    assert gradients == sum(4 * p.numel() for p in trained(model))
    slots = []
    for _ in range(4):
        zinf_compile.save(tmp_path, model, optimizer, wait=True)
        slots.append(len(space_of(tmp_path)._slots))
    assert slots == [1, 1, 1, 1]
    assert names(tmp_path) == ["save-00000004", "save-00000005"], "as many as the option says"
    zinf_compile.save(tmp_path, model, optimizer, keep=3, wait=True)
    assert len(space_of(tmp_path)._slots) == 1
    zinf_compile.save(tmp_path, model, optimizer, keep=1, wait=True)
    assert names(tmp_path) == ["save-00000007"]
    backward(compiled)
    optimizer.step()
    assert len([r for r in caplog.records if r.getMessage().startswith("checkpoints of")]) == 1


def test_models_and_optimizers_with_one_folder_are_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zinf_compile")
    folder, other = tmp_path / "both", tmp_path / "other"
    models = [Small() for _ in range(3)]
    for model, place in zip(models, (folder, folder, other), strict=True):
        model.compile(backend=BACKEND, options={"checkpoint": place})
    optimizers = [
        torch.optim.AdamW([models[0].words.weight, models[0].turned], lr=0.01),
        torch.optim.SGD([*models[0].down.parameters()], lr=0.01, momentum=0.9),
        torch.optim.AdamW(trained(models[1]), lr=0.01),
        torch.optim.AdamW(trained(models[2]), lr=0.01),
    ]
    for model in models[:2]:
        backward(model)
    optimizers[1].step()
    expected = space_of(folder)._sizes
    for optimizer in (optimizers[0], optimizers[2]):
        optimizer.step()
    assert space_of(folder)._sizes == expected, "the first step has counted all optimizers"
    assert reserved_in(other) is None
    both = nn.ModuleList(models[:2])
    for model in models[:2]:
        backward(model)  # gradients are saved until a step has applied them
    assert sizes_in(zinf_compile.save(folder, both, [optimizers[1], optimizers[0], optimizers[2]], wait=True)) == expected
    backward(models[2])
    optimizers[3].step()
    assert 0 < sum(space_of(other)._sizes) < sum(expected)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("checkpoints of")]
    assert [line.partition(" in ")[0] for line in lines] == [
        "checkpoints of Small, Small, AdamW, SGD, AdamW", "checkpoints of Small, AdamW",
    ]  # fmt: skip


def test_an_optimizer_that_comes_later_is_counted_at_its_first_step(tmp_path: Path) -> None:
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    first = torch.optim.SGD([model.words.weight], lr=0.01)
    backward(compiled)
    first.step()
    before = sum(space_of(tmp_path)._sizes)
    second = torch.optim.AdamW([model.turned, *model.down.parameters()], lr=0.01)
    model.zero_grad()
    backward(compiled)
    second.step()
    expected = space_of(tmp_path)._sizes
    assert sum(expected) > before
    model.zero_grad()
    backward(compiled)
    assert sizes_in(zinf_compile.save(tmp_path, model, [first, second], wait=True)) == expected


def test_what_is_larger_than_the_dry_run_grows_the_reservation(tmp_path: Path) -> None:
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    backward(compiled)
    optimizer.step()
    before = sum(space_of(tmp_path)._sizes)
    average = torch.optim.swa_utils.AveragedModel(model)
    both, extra = nn.ModuleDict({"model": model, "average": average}), {"history": torch.zeros(30_000)}
    found = sizes_in(zinf_compile.save(tmp_path, both, optimizer, extra=extra, wait=True))
    assert sum(found) > before + 4 * 30_000
    assert space_of(tmp_path)._sizes == found
    (slot,) = space_of(tmp_path)._slots
    assert slot.lacks(found) == 0
    assert sizes_in(zinf_compile.save(tmp_path, both, optimizer, extra=extra, wait=True)) == found


def test_what_cannot_be_saved_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.SGD(trained(model), lr=0.01)
    optimizer.param_groups[0]["policy"] = object()
    backward(compiled)
    before = zinf_compile.full_state_dict(model)
    with pytest.raises(CheckpointError, match=r"optimizer\.group\.0\.policy is a object; accepted: None, bool"):
        optimizer.step()
    torch.testing.assert_close(zinf_compile.full_state_dict(model), before, rtol=0, atol=0)
    assert names(tmp_path) == []
    assert reserved_in(tmp_path) is None
    del optimizer.param_groups[0]["policy"]
    optimizer.step()
    assert space_of(tmp_path)._slots


def test_reset_and_a_forked_process_let_go(tmp_path: Path) -> None:
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.SGD(trained(model), lr=0.01)
    backward(compiled)
    optimizer.step()
    space = space_of(tmp_path)
    descriptors = [file._fd for slot in space._slots for file in slot.files]
    assert descriptors
    zinf_compile.reset()
    assert reserved_in(tmp_path) is None
    assert space._slots == []


def test_models_that_the_collector_was_told_to_leave_alone(tmp_path: Path) -> None:
    """By `gc.freeze()` modules can't be found: what the optimizer has is counted."""
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    gc.freeze()
    try:
        backward(compiled)
        optimizer.step()
    finally:
        gc.unfreeze()
    numel = sum(p.numel() for p in trained(model))
    assert sum(space_of(tmp_path)._sizes) > 4 * 4 * numel
    assert sizes_in(zinf_compile.save(tmp_path, model, optimizer, wait=True))


def test_an_optimizer_of_what_is_in_no_module(tmp_path: Path) -> None:
    model, alone = Small(), nn.Parameter(torch.ones(3))
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.AdamW([*trained(model), alone], lr=0.01)
    backward(compiled)
    gc.unfreeze()  # PyTorch's first compilation in a process freezes, and what is frozen may be a module that holds it
    with pytest.raises(
        CheckpointError, match=r"optimizer \(AdamW\) has 1 parameters in group 0 that the model has not; accepted"
    ):
        optimizer.step()
    assert names(tmp_path) == []


def test_inside_partitioned(tmp_path: Path) -> None:
    with zinf_compile.partitioned(checkpoint=tmp_path):
        model = Small()
    model.compile(backend=BACKEND)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    backward(model)
    optimizer.step()
    assert space_of(tmp_path)._slots


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint": 3}, "option checkpoint=3 is not a path; accepted: a folder, the same one on all ranks"),
        ({"checkpoint": ""}, "option checkpoint='' is not a path"),
        ({"checkpoint": b"x"}, "is not a path"),
        ({"checkpoint": "x", "checkpoint_keep": 0}, "option checkpoint_keep=0; accepted: the number of checkpoints to keep"),
        ({"checkpoint": "x", "checkpoint_keep": True}, "option checkpoint_keep=True; accepted"),
        ({"checkpoint_keep": 2}, "option checkpoint_keep=2 is given, but no folder: add checkpoint="),
    ],
)
def test_options_that_are_none(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        torch.compile(nn.Linear(3, 3), backend=BACKEND, options=options)(torch.ones(1, 3))


KILLED = """
import os, signal, sys, torch, zinf_compile
from zinf_compile.checkpoint.rank_files import RankFiles
from zinf_compile.checkpoint.reserved_space import reserved_in
from pathlib import Path
model = torch.nn.Linear(300, 300)
compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx", "checkpoint": sys.argv[1]})
optimizer = torch.optim.Adam(model.parameters())
compiled(torch.randn(3, 300)).sum().backward()
optimizer.step()
assert reserved_in(Path(sys.argv[1]))._slots
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_nothing_is_left_of_a_process_that_ends(end: str, tmp_path: Path) -> None:
    done = run_program(KILLED, str(tmp_path), end)
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    assert names(tmp_path) == []


def test_a_save_before_the_first_step_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run takes no file of it for a dead job's."""
    finish = RankFiles.finish

    def slowly(files: RankFiles) -> None:
        time.sleep(1)
        finish(files)

    monkeypatch.setattr(RankFiles, "finish", slowly)
    torch.compiler.reset()
    model = Small()
    compiled = torch.compile(model, backend=BACKEND, options={"checkpoint": tmp_path})
    optimizer = torch.optim.SGD(trained(model), lr=0.01)
    backward(compiled)
    zinf_compile.save(tmp_path, model, optimizer, extra={"step": 0})
    optimizer.step()
    zinf_compile.wait_for_save()
    assert names(tmp_path) == ["save-00000001"]
    assert zinf_compile.load(tmp_path, model, optimizer) == {"step": 0}
