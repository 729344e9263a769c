"""Checkpoints of DeepSpeed loaded on several ranks, for `test_import_on_ranks.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_model import FOLDER, adamw, build
from rank_checkpoint import Uneven, full, optimizer_of, train
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint.torch_archive import TorchArchive
from zinf_compile.errors import CheckpointError


def imported(rank: int, size: int, case: str, options: dict[str, Any]) -> Any:
    """Load onto a model in bf16 that has taken a step; return the whole states, what was read of tensors, and a loss after it."""
    if size > 1:
        options = {**options, "process_group": dist.new_group(list(range(size)))}
    torch.compiler.reset()
    model = build().bfloat16()
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = adamw(model, fused=True)
    step(compiled, optimizer)
    read: list[int] = []
    fill = TorchArchive.fill

    def counting(self: TorchArchive, into: torch.Tensor, offset: int) -> None:
        read.append(into.nbytes)
        fill(self, into, offset)

    TorchArchive.fill = counting  # type: ignore[method-assign]
    try:
        zinf_compile.load(FOLDER / case, model, optimizer)
    finally:
        TorchArchive.fill = fill  # type: ignore[method-assign]
    found = zinf_compile.full_state_dict(model), zinf_compile.full_optimizer_state_dict(optimizer)
    return *found, sum(read), step(compiled, optimizer)


def step(compiled: Any, optimizer: torch.optim.Optimizer) -> float:
    """Take a step on the same tokens on all ranks; return the loss before it."""
    loss = compiled(torch.tensor([[0, 3, 6, 1]]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def refused(rank: int, size: int, folder: str, options: dict[str, Any]) -> str:
    """Load what is damaged for one rank's eyes only; return the message."""
    torch.compiler.reset()
    model = build()
    compiled = torch.compile(model, backend=BACKEND, options={**options, "process_group": dist.new_group(list(range(size)))})
    optimizer = adamw(model, fused=True)
    step(compiled, optimizer)
    before = zinf_compile.full_state_dict(model)
    rename = (lambda name: "x") if rank == 1 else None
    try:
        zinf_compile.load(folder, model, optimizer, rename=rename)
    except CheckpointError as error:
        torch.testing.assert_close(zinf_compile.full_state_dict(model), before, rtol=0, atol=0)
        return str(error)
    return ""


class Renamed(nn.Module):
    """`Uneven` under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Uneven()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(tokens)
        return loss


def renamed(rank: int, size: int, folder: str, options: dict[str, Any], dtype: torch.dtype, on_meta: bool) -> Any:
    """Load what `Uneven` has saved under other names and in another type; return the whole states, and losses after it."""
    options = {**options, "process_group": dist.new_group(list(range(size)))}
    torch.compiler.reset()
    torch.manual_seed(7)
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = Renamed().to(dtype)
    compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    optimizer = optimizer_of(model)
    if not on_meta:
        compiled(torch.zeros(2, 8, dtype=torch.long))  # partitioned
    rename: Any = {name: f"net.{name}" for name in Uneven().state_dict()} if on_meta else lambda name: f"net.{name}"
    extra = zinf_compile.load(folder, compiled, optimizer, rename=rename, dtype=dtype)
    assert extra["step"] == 3
    return *full(model, optimizer), train(compiled, optimizer, range(3, 5))
