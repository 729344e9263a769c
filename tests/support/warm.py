"""Imported by the process that ranks are forked from: it has compiled and trained, and the collector leaves that alone."""

from __future__ import annotations

import gc

gc.disable()  # while all of it is imported

import torch  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed  # noqa: E402
import torch.testing  # noqa: E402
from heap import settle  # noqa: E402
from quick_compile import compile_quickly  # noqa: E402
from torch import nn  # noqa: E402

import zinf_compile  # noqa: E402


def _train() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.reset()


compile_quickly()
torch.set_num_threads(1)
with torch.random.fork_rng(devices=[]):
    _train()
settle()
gc.enable()
