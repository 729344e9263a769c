"""Train a GPT whose states are all on a drive and save it, or load it into a new process and go on, within a memory cap.

    python _load_worker.py SETTINGS    # as JSON what `Settings` names; prints lines of JSON

One of several ranks, where there are several. Peaks are those of anonymous memory (RssAnon), looked at a hundred times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict


class Settings(TypedDict):
    """Settings from load.py."""

    do: str
    """`"save"`: take two steps, save, take another meanwhile. `"load"`: load, take that step. `"only load"`."""
    model: dict[str, int]
    cap: int
    """Of RLIMIT_DATA, and six times the option `device_memory`; 0: none."""
    drive: str
    saved: str
    rank: int
    world: int


class Peaks:
    """The most memory in each phase."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._phase = "start"
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is held inside to a phase, and print its seconds and its peak."""
        self._phase, began = name, time.perf_counter()
        yield
        seconds, self._phase = time.perf_counter() - began, "between"
        print(json.dumps({"phase": name, "s": seconds, "peak_bytes": self.bytes.get(name, 0)}), flush=True)

    def _watch(self) -> None:
        while True:
            text = Path("/proc/self/status").read_text()
            held = 1024 * int(text.split("RssAnon:")[1].split()[0])
            self.bytes[self._phase] = max(self.bytes.get(self._phase, 0), held)
            time.sleep(0.01)


def main() -> None:
    """Do it."""
    settings = Settings(**json.loads(sys.argv[1]))
    if settings["cap"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["cap"],) * 2)
    rank, world = str(settings["rank"]), str(settings["world"])
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings["world"]))
    if settings["world"] > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings['drive']}/rendezvous-{settings['do']}",
            rank=settings["rank"],
            world_size=settings["world"],
        )
    peaks = Peaks()
    torch.manual_seed(0)
    options: dict[str, Any] = {**dict.fromkeys(("params", "grads", "optimizer"), "nvme"), "nvme": settings["drive"]}
    options |= {"compute": "fx", "master": "float32", "reduce_dtype": "bfloat16"}
    if settings["cap"]:
        options["device_memory"] = settings["cap"] // 6
    with torch.device("meta"):
        model = GPT(**settings["model"]).to(torch.bfloat16)
    if settings["do"] == "save":
        with peaks.phase("build"):
            zinf_compile.partition(model, init=_small, **options)
    call = torch.compile(model, backend="zero_infinity", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = (2, 1, settings["model"]["length"])
    tokens, targets = torch.randint(settings["model"]["vocabulary"], size, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"loss": loss.item()}), flush=True)

    if settings["do"] == "save":
        with peaks.phase("train"):
            for _ in range(2):
                step()
            zinf_compile.synchronize()
        with peaks.phase("save, beside a step"):
            zinf_compile.save(settings["saved"], call, optimizer)
            step()
            zinf_compile.wait_for_save()
    else:
        with peaks.phase("load"):
            zinf_compile.load(settings["saved"], call, optimizer)
        if settings["do"] == "load":
            with peaks.phase("train"):
                step()
                zinf_compile.synchronize()


def _small(module: Any) -> None:
    import torch  # noqa: PLC0415

    if isinstance(module, torch.nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)


if __name__ == "__main__":
    main()
