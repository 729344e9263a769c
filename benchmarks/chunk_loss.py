"""A loss computed in chunks beside eager PyTorch's: the memory of head and loss, and the time of a training step.

    python benchmarks/chunk_loss.py                  # a 124M GPT with a vocabulary of 262,144, on 2,048 tokens
    python benchmarks/chunk_loss.py --chunk 64 --chunk 256   # other sizes of a chunk's logits, in MiB
    python benchmarks/chunk_loss.py --json FILE      # keep the numbers
    python benchmarks/chunk_loss.py --docs FILE      # measure nothing: write its table in docs/ from kept numbers

Memory is that of head and loss alone: a module of a linear head and cross-entropy, of the GPT's sizes, runs forward and backward,
and what counts is the most that its process held meanwhile (VmHWM), less what it held before and less the bytes of the head's
gradient, which all must end up with. Time is that of a step of the whole GPT, its embedding tied to its head, with plain SGD, so
that all peers fit into memory together; they take steps in turn, and medians count. The floor is the time of the step's matrix
products alone, at the speed measured in the same run.

The targets: at most a tenth of eager's memory, in at most 1.1 of its time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _docs
from _peers import Peer, alternate, matmul_rate, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 12, 768, 12, 262_144, 1024, 2
TOKENS = LENGTH * BATCH
MEMORY_LIMIT, TIME_LIMIT = 0.1, 1.1
MIB = 2**20


def compiled(peer: str, model: Any) -> Any:
    """Return the model as `peer` runs it: "eager", "zinf fx", "zinf inductor", or either with a size: "zinf fx 64"."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about threads and caches)

    if peer == "eager":
        return model
    _, compute, *size = peer.split()
    options = {"compute": compute, **({"compute_shape": {"chunk_bytes": int(size[0]) * MIB}} if size else {})}
    return torch.compile(model, backend="zero_infinity", options=options)


def work(peer: str, layers: int, pipe: Any) -> None:
    """Train the GPT in this process, one step when told to."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    warnings.simplefilter("ignore")

    def make() -> TakeStep:
        torch.manual_seed(0)
        model = GPT(layers=layers, width=WIDTH, heads=HEADS, vocabulary=VOCABULARY, length=LENGTH)
        return stepping(compiled(peer, model), torch.optim.SGD(model.parameters(), lr=1e-4))

    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    serve(pipe, lambda: (tokens[:, :-1], tokens[:, 1:]), make)


def weigh(peer: str, pipe: Any) -> None:
    """Send the bytes that head and loss take in this process, above those of the head and its gradient."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn import functional as F  # noqa: PLC0415

    warnings.simplefilter("ignore")

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Head()
    call = compiled(peer, model)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH))
    found: list[int] = []
    for _ in range(2):  # the first call compiles
        model.zero_grad()
        x.grad = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = _held("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
        call(x, targets).backward()
        found.append(_held("VmHWM") - before - 4 * WIDTH * VOCABULARY)
    pipe.send(found[-1])


def _held(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def measure_memory(peers: Sequence[str]) -> dict[str, int]:
    """Return each peer's bytes, measured one after the other."""
    found: dict[str, int] = {}
    for peer in peers:
        rank = spawn(weigh, peer)
        found[peer] = rank.pipe.recv()
        rank.join(30)
    return found


def floor_s(layers: int) -> float:
    """Return the seconds that a step's matrix products take at the rate measured here and now."""
    block = 12 * WIDTH * WIDTH * layers * TOKENS
    return 3 * 2 * (block + WIDTH * VOCABULARY * TOKENS) / matmul_rate(os.cpu_count() or 1)


def measure(names: Sequence[str], layers: int, rounds: int) -> dict[str, Any]:
    """Return the peers' memory of head and loss, and their steps."""
    memory = measure_memory(names)
    print({name: f"{held / MIB:,.0f} MiB" for name, held in memory.items()}, flush=True)
    rows = alternate([Peer(name, [spawn(work, name, layers)]) for name in names], rounds)
    return {"rows": rows, "head_and_loss_bytes": memory, "floor_s": floor_s(layers), "layers": layers, "rounds": rounds}


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to eager, the targets and the floor."""
    rows, memory = result["rows"], result["head_and_loss_bytes"]
    table = [
        [*cells, f"{memory[row['peer']] / MIB:,.0f}", f"{memory[row['peer']] / memory['eager']:.3f}"]
        for row, cells in zip(rows, table_rows(rows), strict=True)
    ]
    headers = ["peer", "step s", "/ eager", "CPU s", "first step s", "peak PSS GiB", "head and loss MiB", "/ eager"]
    return "\n\n".join(
        [
            f"{result['layers']} layers, vocabulary {VOCABULARY:,}, {TOKENS:,} tokens, medians of {result['rounds']} steps:",
            tabulate(table, headers, "github", disable_numparse=True),
            "\n".join(targets(result)),
            f"Floor (the matrix products alone, at the rate measured in this run): {result['floor_s']:.1f} s.",
        ]
    )


def targets(result: dict[str, Any]) -> list[str]:
    """Return a line for each target: what was found, and whether it is met."""
    rows, memory = result["rows"], result["head_and_loss_bytes"]
    found = []
    for row in rows[1:]:
        pairs = [
            ("memory of head and loss", memory[row["peer"]] / memory["eager"], MEMORY_LIMIT, 3),
            ("step", row["step_s"] / rows[0]["step_s"], TIME_LIMIT, 2),
        ]
        found += [
            f"- {row['peer']} / eager, {what}: {ratio:.{digits}f}, target at most {most}: {'met' if ratio <= most else 'missed'}"
            for what, ratio, most, digits in pairs
        ]
    return found


def main() -> int:
    """Measure, print, keep; fail beyond the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--compute", nargs="+", default=["fx", "inductor"])
    parser.add_argument("--chunk", type=int, action="append", metavar="MIB", help="instead of the size that is chosen")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/chunk_loss.py", report, options.docs)
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sizes = [f" {size}" for size in options.chunk or ()] or [""]
    names = ["eager", *(f"zinf {compute}{size}" for compute in options.compute for size in sizes)]
    result = measure(names, options.layers, options.rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("missed" in line for line in targets(result)))


if __name__ == "__main__":
    sys.exit(main())
