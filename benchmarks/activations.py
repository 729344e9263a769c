"""Saved values on a drive: a step's time and the process's memory, beside keeping them and beside checkpointing every block.

    python benchmarks/activations.py DIR                  # values on a drive at DIR
    python benchmarks/activations.py DIR --json FILE      # keep the numbers
    python benchmarks/activations.py DIR --length 4096    # another length

A GPT trains on one long sequence, its loss in chunks, all states in memory; peers take steps in turn, and medians count. On this
machine the device is host memory, so the drive is the far tier.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from _peers import Peer, alternate, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

SIZE = {"width": 768, "heads": 12, "vocabulary": 8192}
MIB = 2**20


def work(layers: int, length: int, way: str, folder: str, pipe: Any) -> None:
    """Train the GPT in this process, one step when told to; `way` is keep, nvme or checkpoint."""
    import torch  # noqa: PLC0415
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    warnings.simplefilter("ignore")

    class Checkpointed(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    models: list[torch.nn.Module] = []

    def make() -> TakeStep:
        torch.manual_seed(0)
        model = GPT(**SIZE, layers=layers, length=length)
        if way == "checkpoint":
            model.h = torch.nn.ModuleList(map(Checkpointed, model.h))
        models.append(model)
        options = {"chunk_loss": True, **({"activations": "nvme", "nvme": folder} if way == "nvme" else {})}
        call = torch.compile(model, backend="zero_infinity", options=options)
        return stepping(call, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def links() -> dict[str, Any]:
        found: dict[str, Any] = zinf_compile.stats(models[0])["links"]
        return found

    tokens = torch.randint(SIZE["vocabulary"], (1, length + 1), generator=torch.Generator().manual_seed(1))
    serve(pipe, lambda: (tokens[:, :-1], tokens[:, 1:]), make, more={"links": links})


def measure(folder: str, layers: int, length: int, rounds: int) -> dict[str, Any]:
    """Have all peers take steps in turn; return their rows, and what the links of the offloading one moved."""
    peers = [Peer(way, [spawn(work, layers, length, way, folder)]) for way in ("keep", "nvme", "checkpoint")]
    (links,) = peers[1].ask("links")
    return {"rows": alternate(peers, rounds), "links": links, "layers": layers, "length": length}


def report(result: dict[str, Any]) -> str:
    """Return the table, the bytes of a step, and whether bits are equal."""
    rows, links = result["rows"], result["links"]
    written, read = (links[way]["bytes_last_step"] / MIB for way in ("host to nvme", "nvme to host"))
    waited = sum(links[way]["waited_s_last_step"] for way in ("host to nvme", "nvme to host"))
    same = rows[0]["losses"] == rows[1]["losses"]
    headers = ["activations", "step s", "/ keep", "CPU s", "first step s", "peak PSS GiB"]
    return "\n\n".join(
        [
            f"A GPT of {result['layers']} blocks, one sequence of {result['length']:,} tokens:",
            tabulate(table_rows(rows), headers, "github"),
            f"- the first step wrote {written:,.0f} MiB and read {read:,.0f} MiB; compute stood still {waited:.2f} s for them",
            f"- losses of nvme and keep: {'equal to the bit' if same else 'DIFFERENT'}",
        ]
    )


def main() -> int:
    """Measure, print, keep; fail where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(folder, options.layers, options.length, options.rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["rows"][0]["losses"] != result["rows"][1]["losses"])


if __name__ == "__main__":
    raise SystemExit(main())
