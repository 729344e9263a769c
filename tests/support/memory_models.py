"""What the memory model says of a model that is trained, beside what the ledgers measured."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from training import adamw

import zinf_compile
from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.ir.tiers import Topology
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.parameter import ShardedParameter


class Small(nn.Module):
    """A tied embedding and head, layers of these widths, a number, and one parameter that isn't trained."""

    def __init__(self, widths: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        ends = [widths[0], *widths, widths[0]]
        self.words = nn.Embedding(61, widths[0], dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(ends))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.fixed = nn.Parameter(torch.ones(3, widths[0], dtype=dtype), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.fixed[0]
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return (x @ self.words.weight.t()).float().square().mean()


def check_against_ledgers(widths: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> None:
    """Train for two steps of two micro-batches; what stays is what the model says, and no peak of a kind is above it."""
    budgets: list[GraphBudget] = []

    class Watched(GraphCompiler):
        def make_budget(self, slots: Sequence[ParameterSlot], inputs: Sequence[Any], context: Context) -> GraphBudget:
            budgets.append(super().make_budget(slots, inputs, context))
            return budgets[-1]

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        config = Config.from_options({"compute": "fx", **options})
        return Watched(config, given=tuple(options)).compile(gm, inputs)

    torch.compiler.reset()
    zinf_compile.reset()  # what earlier models left in the accounts
    torch.manual_seed(0)
    model = Small(widths, dtype)
    optimizer = adamw(model.parameters())
    compiled: Any = torch.compile(model, backend=backend)
    tokens = torch.arange(14).view(2, 7)
    compiled(tokens)
    parameter = model.words.weight
    assert isinstance(parameter, ShardedParameter)
    memory = parameter._zinf_unit.context.memory
    ledgers = (memory.ledger,) if memory.ledger is memory.host_ledger else (memory.ledger, memory.host_ledger)
    for ledger in ledgers:
        ledger.forget_peaks()

    def held(kind: str) -> Sides:
        now = [ledger.now()[kind] for ledger in ledgers]
        return Sides(now[0], sum(now[1:]))

    expected = budgets[0].model
    for step in range(2):
        for micro in range(2):
            compiled(tokens).backward()
            zinf_compile.synchronize()
            if not (step or micro):
                assert held("params") == expected.shards
                left = max(passing.left for budget in budgets for passing, _ in budget.plans)  # 0 where gradients stay
                beside = Sides(left, expected.offloading if len(ledgers) > 1 else 0)
                most = expected.gradients.plus(beside)
                deadline = time.monotonic() + 20
                while any(map(operator.gt, held("grads"), most)) and time.monotonic() < deadline:
                    time.sleep(0.01)  # a worker holds what it has moved until it has left its functions
                for found, stays, more in zip(held("grads"), expected.gradients, beside, strict=True):
                    assert stays <= found <= stays + more  # the last one's buffer may be there until the next takes its place
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()
    buffers = [states.transfers.buffers for states in record_of(optimizer).offloaded or []]
    topology = Topology(host_apart=len(ledgers) > 1)
    chunks = topology.counted(Sides(sum(b.device_bytes for b in buffers), sum(b.host_bytes for b in buffers)))
    in_buffers = Sides(0, chunks.host) if len(ledgers) > 1 else chunks  # those on a device count as staging
    assert held("states") == expected.states.plus(in_buffers)
    plans = [plan for budget in budgets for plan in budget.plans]
    count = min(plan.chunk_buffers for _, plan in plans)
    for side, ledger in enumerate(ledgers):
        assert chunks[side] <= count * expected.chunk[side]
        peak = ledger.peak()
        reduced = [passing.reduced + passing.converted + plan.reduced for passing, plan in plans]
        passes = max(passing.with_plan(plan)[side] for passing, plan in plans)
        gathered = max(
            passing.gathered + passing.rows + plan.ahead * passing.on_device
            if side == 0
            else (passing.full + passing.rows + plan.ahead) * passing.on_host
            for passing, plan in plans
        )
        staging = max(expected.staging + plan.staging for _, plan in plans) if side == len(ledgers) - 1 else 0
        assert peak["params"] == expected.shards[side]
        assert peak["gathered"] <= gathered + 1
        assert peak["bounce"] <= staging
        read = (expected.read, expected.normed)[len(ledgers) > 1] if side == 0 else expected.read
        assert peak["grads"] + peak["staging"] <= 2 * expected.gradients[side] + max(*reduced, read, passes) + chunks[side]
        assert (
            ledger.total()[1] <= expected.resident[side] + expected.added_by_steps[side] + count * expected.chunk[side] + passes
        )
    del compiled, model, optimizer
