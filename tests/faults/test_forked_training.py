"""A process forked from one that trains with a drive: it trains models of its own, and leaves its parent's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, torch, zinf_compile
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x).square().mean()

drives = {"nvme": sys.argv[1], **dict.fromkeys(("params", "grads", "optimizer"), "nvme")}

def train():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    call = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **drives})
    return [step(call, optimizer) for _ in range(3)], call, optimizer

def step(call, optimizer):
    loss = call(torch.ones(2, 16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

losses, call, optimizer = train()
train()  # another one: Dynamo's graph serves any
for resets in (False, True):
    if (child := os.fork()) == 0:
        if resets:
            zinf_compile.reset()
        else:
            try:
                step(call, optimizer)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            try:
                train()
            except Exception as error:
                print(type(error).__name__, str(error).split(", or")[0], flush=True)
            torch.compiler.reset()
        print("the child's are the same:", train()[0] == losses, flush=True)
        sys.stdout.flush()
        os._exit(0)
    print("exit", os.waitpid(child, 0)[1], flush=True)
print("the parent goes on:", step(call, optimizer) < losses[-1])
"""


def test_a_forked_child_trains_models_of_its_own(tmp_path: Path) -> None:
    """One thread: PyTorch's kernels on several hang in a forked child whose parent has run some."""
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(
        program, check=False, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    refusal, compiled, *lines = ended.stdout.splitlines()
    assert "which forked this one: make the model that uses it here, or start processes by spawn" in refusal
    assert "drives of a process that forked this one: call torch.compiler.reset() here" in compiled
    assert lines == [*["the child's are the same: True", "exit 0"] * 2, "the parent goes on: True"]
