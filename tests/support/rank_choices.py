"""What ranks decide once for each parameter, with other batches on each."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from losses import CLASSES, HIDDEN, LOSSES, Head
from near import assert_gradients_near, assert_near
from torch import fx, nn
from training import assert_same, whole_gradient

import zinf_compile
from zinf_compile.backend import graph_compiler
from zinf_compile.config import Config
from zinf_compile.errors import BudgetError, ZinfError
from zinf_compile.ir.compute_ops import class_targets
from zinf_compile.ir.program import Program
from zinf_compile.sharded.parameter import ShardedParameter

ROWS = 6000
TOKENS = ((64, 96), (4096, 4096))
"""Of the two steps on each rank: rank 0 compiles again alone."""


class Words(nn.Module):
    """Words that are looked up, and others that are also a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 16)
        self.few = nn.Embedding(4000, 16)
        self.tied = nn.Embedding(ROWS, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.words(x % 5000) + self.few(x % 4000) + self.tied(x))
        return (y @ self.tied.weight[:3].T).square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(ROWS, (TOKENS[rank][step],), generator=torch.Generator().manual_seed(2 * step + rank))


def look_rows_up(rank: int, size: int, options: dict[str, Any]) -> dict[str, int]:
    """Train two steps, on 64 tokens and on 4,096, rank 0 compiling again alone; then run a graph without a backward.

    Returns the bytes that this rank got from the others in the first forward.
    """
    torch.manual_seed(3)
    model = Words()
    eager = [copy.deepcopy(model) for _ in range(size)]
    model.compile(backend="zero_infinity", options={"compute": "fx", "timeout_s": 100, **options})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, *eager)]
    for step in range(2):
        losses = [model(batch(rank, step)), *(m(batch(r, step)) for r, m in enumerate(eager))]
        assert_same(f"loss of step {step}", losses[1 + rank].detach(), losses[0].detach())
        for loss in losses:
            loss.backward()
        for name, parameter in model.named_parameters():
            parts = [dict(m.named_parameters())[name].grad for m in eager]
            mean = torch.stack(parts).sum(0) / size  # type: ignore[arg-type]
            assert_same(f"gradient of {name} in step {step}", mean, whole_gradient(parameter))
            for m in eager:
                dict(m.named_parameters())[name].grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert_same("without a backward", eager[0](batch(rank, 0)), model(batch(rank, 0)))
    chosen = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter)
        chosen[name] = parameter._zinf_unit.chosen.get("rows")
    dist.barrier()
    return {"chosen": chosen, "gathered": zinf_compile.stats(model)["links"]["from ranks"]["bytes"]}  # type: ignore[dict-item]


class Recording(graph_compiler.GraphCompiler):
    """Notes which graphs took their loss in chunks."""

    notes: ClassVar[list[bool]] = []

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        if kind != "backward":
            self.notes.append(any(node.target is class_targets for node in graph.graph.nodes))
        return super().schedule(graph, kind)


TOKENS_OF_LOSS = {
    "large on one": ((8, 6, 11), (16, 16, 16)),
    "small": ((8, 6, 12), (5, 5, 5)),
    "asked for": ((5, 6, 7), (5, 5, 5)),
}
"""Of three steps on each rank: rank 0 compiles again alone."""


def chunk_losses(rank: int, size: int, compute: str) -> dict[str, list[bool]]:
    """Train a head three steps, with other numbers of tokens on each rank, near the mean of eager's gradients.

    Logits of more than 9 tokens are large.
    """
    noted = {}
    for case, tokens in TOKENS_OF_LOSS.items():
        torch.compiler.reset()
        Recording.notes = []
        torch.manual_seed(7)
        model = Head(LOSSES["smoothed"], bias=True)
        eager = [copy.deepcopy(model) for _ in range(size)]
        shape = {"worth_bytes": 4 * CLASSES * 9, "chunk_bytes": 4 * CLASSES * 5}
        asked = {"chunk_loss": True} if case == "asked for" else {}
        config = Config.from_options({"compute": compute, "timeout_s": 100, "compute_shape": shape, **asked})
        compiled = torch.compile(model, backend=lambda gm, inputs, config=config: Recording(config).compile(gm, inputs))
        for step, counts in enumerate(zip(tokens[0], tokens[1], strict=True)):
            losses = []
            for source, called in ((rank, compiled), *enumerate(eager)):
                numbers = torch.Generator().manual_seed(10 * step + source)
                x = torch.randn(1, counts[source], HIDDEN, generator=numbers)
                losses.append(called(x, torch.randint(CLASSES, (1, counts[source]), generator=numbers)))
                losses[-1].backward()
            assert_near(f"loss of step {step}", losses[0], losses[1 + rank])
            mean = {}
            for parts in zip(*(m.named_parameters() for m in eager), strict=True):
                mean[parts[0][0]] = torch.stack([p.grad for _, p in parts if p.grad is not None]).mean(0)
                for _, parameter in parts:
                    parameter.grad = None
            assert_gradients_near(model, mean, f"step {step}")
            model.zero_grad()
        noted[case] = Recording.notes
    dist.barrier()
    return noted


def named_cap(rank: int) -> int:
    """Return the cap that refusals come to name; all ranks name the same."""
    cap = 1
    for _ in range(6):
        torch.compiler.reset()
        gc.collect()
        model = Words()
        model.compile(backend="zero_infinity", options={"compute": "fx", "timeout_s": 100, "device_memory": cap})
        try:
            model(batch(rank, 0))
        except BudgetError as error:
            cap = int(re.findall(r"smallest that works is ([\d,]+)", str(error))[0].replace(",", ""))
        else:
            return cap
    raise AssertionError(f"{cap} is not enough")


def recompile_within_a_cap(rank: int, size: int) -> tuple[dict[str, int], str]:
    """Train within the least memory, rank 0 compiling again alone; then let it be short when it does. Return what is said."""
    cap = named_cap(rank)
    torch.compiler.reset()
    found = look_rows_up(rank, size, {"device_memory": cap})
    torch.compiler.reset()
    gc.collect()
    model = Words()
    model.compile(
        backend="zero_infinity",
        options={"compute": "fx", "timeout_s": 4, "device_memory": cap, "process_group": dist.new_group()},
    )
    model(batch(rank, 0)).backward()
    context = model.words.weight._zinf_unit.context  # type: ignore[attr-defined]
    held = torch.empty(cap if rank == 0 else 0, dtype=torch.uint8)
    context.memory.ledger.track("staging", held)
    try:
        model(batch(rank, 1))
    except ZinfError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    dist.barrier()
    return found, said
