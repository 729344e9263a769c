"""Saved values made again by regions that Inductor has compiled: no further region, the bits and random numbers of keeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capped_blocks import VALUE, WORDS, Run, least, machine, same
from marks import more
from torch import nn

from zinf_compile.backend import regions
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Region


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("autocast", [False, more(True)])
def test_recompute_has_the_bits_of_keep_and_compiles_no_region_more(autocast: bool) -> None:
    found, compiled = [], []
    for word in ("keep", "recompute"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, programs = Blocks(), dict[str, Program]()

        class Watching(GraphCompiler):
            def schedule(self, graph: Any, kind: str, programs: dict[str, Program] = programs) -> Program:
                programs[kind] = program = super().schedule(graph, kind)
                return program

        config = Config.from_options({"activations": word})
        call: Any = torch.compile(model, backend=lambda gm, inputs, config=config, cls=Watching: cls(config).compile(gm, inputs))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        losses = []
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = call(torch.randn(8, 32, generator=torch.Generator().manual_seed(number)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()])
        compiled.append(set(regions._shared))
    assert all(map(torch.equal, *found))
    assert compiled[0] >= compiled[1]
    again = [step for step in programs["backward"].steps if isinstance(step, Region) and step.name.endswith("again")]
    assert len(again) == 2
    assert {id(step.fn) for step in again} <= {id(s.fn) for s in programs["forward"].steps if isinstance(s, Region)}


@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
def test_some_blocks_run_again_some_values_move_some_stay(tmp_path: Path) -> None:
    drive = {**WORDS, "compute": "inductor", "nvme": str(tmp_path)}
    cap = least({**drive, "activations": "nvme"}) + 15 * VALUE
    drive["machine"] = str(machine(tmp_path / "machine.json", drive=3e9))
    expected = Run({"compute": "inductor"})
    expected.step()
    compiled = set(regions._shared)
    run = Run({**drive, "device_memory": cap})
    run.step()
    assert same(run, expected)
    assert min(run.decided.values()) > 0
    assert run.held_at_most() <= cap
    assert compiled >= set(regions._shared)
