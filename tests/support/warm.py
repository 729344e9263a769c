"""Imported by the process that ranks are forked from: it has compiled and trained, and the collector leaves that alone."""

from __future__ import annotations

import gc
import sys

gc.disable()  # while all of it is imported

import torch  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed  # noqa: E402
import torch.testing  # noqa: E402
from heap import settle  # noqa: E402
from quick_compile import compile_quickly  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import zinf_compile  # noqa: E402


class _Model(nn.Module):
    """Has a forward of its own: Dynamo leaves a frame of `torch.nn` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def _train() -> None:
    """Train a model in both ways to compile one, and evaluate it.

    An eager backward is first: there PyTorch counts devices, for autograd's threads, which aren't forked. Once a graph is traced
    a build with CUDA counts eight without having one. [torch 2.11, 2.15]
    """
    torch.ones((), requires_grad=True).backward()
    graphs = counters["stats"]["unique_graphs"]
    options = {"compute": "fx", "params": "device"}
    for in_place in (True, False):
        model = _Model()
        if in_place:
            model.compile(backend="zero_infinity", options=options)
        compiled = model if in_place else torch.compile(model, backend="zero_infinity", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            compiled(torch.ones(2, 4)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            compiled(torch.ones(2, 4))
        zinf_compile.reset()
    assert counters["stats"]["unique_graphs"] > graphs
    counters.clear()


compile_quickly()
torch.set_num_threads(1)
if "tqdm" in sys.modules:
    sys.modules["tqdm"].tqdm.monitor_interval = 0  # the first compilation would start a thread of its own, which isn't forked
with torch.random.fork_rng(devices=[]):
    _train()
settle()
gc.enable()
