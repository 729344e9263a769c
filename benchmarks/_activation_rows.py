"""What benchmarks/activations.py measures beside a step on a drive: a function for each of its rows, which returns plain values.

Each model is built in a process of its own; the parent holds none.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _links import write_profile
from _peers import Peer, all_cores, alternate, matmul_rate, spawn
from _worker import TakeStep, serve, stepping

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
KEEP, CHECKPOINT, AUTO, EAGER = "keep", "checkpoint", "auto", "eager"
"""Ways to train: the second keeps what `torch.utils.checkpoint` around every block leaves."""

GIB = 2**30
SECONDS = 600
"""Most of a step on a long sequence."""
RESERVE = 640 << 20
"""By which a process may grow beyond the cap: compiled code, and what PyTorch and the compiler load at the first call."""

GPT_124M = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}
STATES = ("params", "grads", "optimizer")


def checkpoint_blocks(model: Any) -> None:
    """Checkpoint every block of a GPT."""
    import torch  # noqa: PLC0415  (in the worker)
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    class Checkpointed(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    model.h = torch.nn.ModuleList(map(Checkpointed, model.h))


def gpt(way: str, **size: int) -> Any:
    """Return a GPT, with every block checkpointed where that is the way."""
    import torch  # noqa: PLC0415  (in the worker)

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    model = GPT(**size)
    torch.nn.init.normal_(model.wte.weight, std=0.02)
    if way == CHECKPOINT:
        checkpoint_blocks(model)
    return model


def word(way: str) -> str:
    """Return option `activations` of a way."""
    return AUTO if way == AUTO else KEEP


def ask(work: Callable[..., None], *args: Any) -> Any:
    """Return what `work(*args, pipe)` sends from a process of its own; an `EOFError` where it ends without."""
    rank = spawn(work, *args)
    try:
        return rank.pipe.recv()
    finally:
        rank.join(60)


# The longest sequence.


def long_options(way: str, cap: int, folder: str) -> dict[str, Any]:
    """Return the options of a long sequence: all states on the drive, losses in chunks."""
    states = dict.fromkeys(STATES, "nvme")
    return {"device_memory": cap, "nvme": folder, "chunk_loss": True, "compute": "fx", "activations": word(way), **states}


def plan_long(way: str, length: int, cap: int, folder: str, pipe: Any) -> None:
    """Send whether a sequence fits by the plan, on tensors without values, and in which seconds that was known."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.trace import trace  # noqa: PLC0415
    from zinf_compile.errors import BudgetError  # noqa: PLC0415

    sys.path.insert(0, str(SUPPORT))
    from named_cap import named_cap  # noqa: PLC0415

    warnings.simplefilter("ignore")
    began = time.monotonic()
    found: dict[str, Any] = {"length": length, "fits": True, "why": "the plan"}

    def target() -> tuple[Any, tuple[Any, Any]]:
        tokens = torch.zeros(1, length, dtype=torch.long)
        return gpt(way, **GPT_124M, length=length), (tokens, tokens)

    try:
        found["saved"] = trace(target, options=long_options(way, cap, folder))[0].saved
    except BudgetError as error:
        found |= {"fits": False, "why": "the plan refuses it", "smallest_cap": named_cap(error)}
    pipe.send(found | {"seconds": time.monotonic() - began})


def step_long(way: str, length: int, cap: int, folder: str, pipe: Any) -> None:
    """Take one step on a sequence; send its seconds, and by how much the process grew."""
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415

    warnings.simplefilter("ignore")
    tokens = torch.randint(GPT_124M["vocabulary"], (1, length + 1), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    torch.randn(512, 512) @ torch.randn(512, 512)  # threads, and their memory, are there
    with growth() as grown:
        model = gpt(way, **GPT_124M, length=length)
        if way != EAGER:
            model.compile(backend="zero_infinity", options=long_options(way, cap, folder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        began = time.monotonic()
        loss = stepping(model, optimizer)(tokens[:, :-1], tokens[:, 1:]).item()
        if way != EAGER:
            zinf_compile.synchronize()
        seconds = time.monotonic() - began
    found = {"length": length, "step_s": seconds, "loss": loss, "grown_bytes": grown()}
    if way != EAGER:
        stats = zinf_compile.stats(model)
        found |= {"saved": dict(stats["activations"]), "runtime_bytes": stats["memory"]["device"]["peak"]["all"]}
    pipe.send(found)


@contextlib.contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Context that samples this process's own memory; the function returns by how much it grew at most."""
    over, first = threading.Event(), _anonymous()
    most = [first]

    def sample() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], _anonymous())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield lambda: most[0] - first
    finally:
        over.set()
        sampler.join()


def _anonymous() -> int:
    """Return the bytes of memory that only this process has: no files, no libraries."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def search(fits: Callable[[int], bool], *, step: int, most: int) -> int:
    """Return the largest multiple of `step`, at most `most`, that fits: doubled, then halved; 0 where none does."""
    low, high = 0, step
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + step)
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest(way: str, cap: int, *, step: int, most: int, folder: str) -> dict[str, Any]:
    """Return the row of a way: its longest sequence, the step that it took on it, and all trials.

    Ours is searched by the plan, and then trained on; eager, which has no plan, is trained on each.
    """
    trials: list[dict[str, Any]] = []
    steps: dict[int, dict[str, Any]] = {}

    def by_step(length: int) -> bool:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            found = steps[length] = ask(step_long, way, length, cap, own)
        over = found["grown_bytes"] > cap + (RESERVE if way != EAGER else 0)
        late = found["step_s"] > SECONDS
        why = "grew too much" if over else f"took more than {SECONDS} s" if late else "a step"
        trials.append({"length": length, "fits": not (over or late), "why": why, **found})
        return not (over or late)

    def by_plan(length: int) -> bool:
        trials.append(ask(plan_long, way, length, cap, folder))
        print(way, trials[-1], flush=True)
        return bool(trials[-1]["fits"])

    length = search(by_step if way == EAGER else by_plan, step=step, most=most)
    while way != EAGER and length and not by_step(length):
        length -= step
    print(way, length, steps.get(length), flush=True)
    return {"way": way, "length": length, "step": steps.get(length), "trials": trials}


# A step behind slow links.

STEP_SIZE = {"layers": 8, "width": 256, "heads": 4, "vocabulary": 2048, "length": 1024}
BATCH = 4
_OF_A_TOKEN = 24 * STEP_SIZE["width"] + 4 * STEP_SIZE["length"]
NEEDED_AGAIN = 1 - 8 * STEP_SIZE["width"] / _OF_A_TOKEN
"""Part of a block's operations that make again what it saves: its last product only hands on to the next block."""
BUCKET = "1MiB"
"""A third of a block: where stretches of compute end, beside which values move."""


def least_cap(pipe: Any) -> None:
    """Send the smallest cap with which the model keeps everything, and the bytes that its forward saves."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.trace import trace  # noqa: PLC0415
    from zinf_compile.errors import BudgetError  # noqa: PLC0415

    sys.path.insert(0, str(SUPPORT))
    from named_cap import named_cap  # noqa: PLC0415

    def target() -> tuple[Any, tuple[Any, Any]]:
        tokens = torch.zeros(BATCH, STEP_SIZE["length"], dtype=torch.long)
        return gpt(KEEP, **STEP_SIZE), (tokens, tokens)

    options = {"compute": "fx", "bucket": BUCKET, "activations": KEEP, **dict.fromkeys(STATES, "device")}
    saved = trace(target, options=options, device="cuda")[0].saved
    try:
        trace(target, options={**options, "device_memory": 1}, device="cuda")
    except BudgetError as error:
        pipe.send({"keep_cap": named_cap(error), "saved": sum(saved.values())})


def train_behind(way: str, cap: int, rate: float, flops: float, machine: str, pipe: Any) -> None:
    """Train behind two links of `rate` bytes per second, one step when told to; `machine`: a file for this machine's profile."""
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating  # noqa: PLC0415

    warnings.simplefilter("ignore")
    write_profile(Path(machine), flops=flops, rate=rate, memory=cap)
    models: list[Any] = []

    def make() -> TakeStep:
        torch.manual_seed(0)
        model = gpt(way, **STEP_SIZE)
        models.append(model)
        options: dict[str, Any] = {"compute": "fx", "bucket": BUCKET, "activations": word(way)}
        options |= dict.fromkeys(STATES, "device")
        options |= {"device_memory": cap, "machine": machine} if way == AUTO else {}
        call = torch.compile(model, backend="zero_infinity", options=options)
        return stepping(call, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    tokens = torch.randint(STEP_SIZE["vocabulary"], (BATCH, STEP_SIZE["length"] + 1), generator=torch.Generator().manual_seed(1))
    with simulating(SimulatedDevice(bytes_per_s=rate)):
        serve(
            pipe,
            lambda: (tokens[:, :-1], tokens[:, 1:]),
            make,
            more={"stats": lambda: zinf_compile.stats(models[0])},
        )


def steps_behind(ratio: float, rounds: int) -> dict[str, Any]:
    """Return steps of all ways behind links that move a byte in the time of `ratio` operations, at half of what keeping takes."""
    known = ask(least_cap)
    cap, flops = known["keep_cap"] // 2, ask(send_rate)
    rate = flops / ratio
    with tempfile.TemporaryDirectory() as folder:
        files = {way: f"{folder}/{way}.json" for way in (KEEP, CHECKPOINT, AUTO)}
        peers = [Peer(way, [spawn(train_behind, way, cap, rate, flops, file)]) for way, file in files.items()]
        (stats,) = peers[2].ask("stats")
        rows = alternate(peers, rounds)
    memory = stats["memory"]["device"]["peak"]["all"]
    waited = {link: figures["waited_s_last_step"] for link, figures in stats["links"].items()}
    found = {"ratio": ratio, "flops": flops, "bytes_per_s": rate, "cap": cap, **known, "rows": rows, "memory": memory}
    return found | {"decided": dict(stats["activations"]), "waited": waited}


def send_rate(pipe: Any) -> None:
    """Send the rate of one large matrix product."""
    pipe.send(matmul_rate(all_cores()))


def least_seconds(case: dict[str, Any]) -> float:
    """Return seconds that no mixture of moving, and of running whole blocks again, goes below, at the rates of the case.

    What has to leave has left when the forward ends, which takes a third of the compute for all, and comes back beside the
    backward; or it is made again there by forwards, less their blocks' last products. As if a block that runs again left nothing
    behind, and the last one could.
    """
    kept = next(row["step_s"] for row in case["rows"] if row["peer"] == KEEP)
    leaves = (case["keep_cap"] - case["cap"]) / case["saved"]

    def taken(again: float) -> float:
        moving = max(0.0, leaves - again) * case["saved"] / case["bytes_per_s"]
        return max(kept / 3, moving) + max(kept * (2 + again * NEEDED_AGAIN) / 3, moving)

    parts = [min(leaves, 1.0) * number / 1000 for number in range(1001)]
    return min(map(taken, parts))


# Measured and predicted peaks.

PEAK_WORDS = {"keep": {}, "recompute": {}, "auto": {}, "slices of tokens": {"activations": "keep"}}
"""Options by the name of a row."""


def peaks(models: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the predicted and the measured peak of each model under each word, at the smallest cap that works."""
    return [ask(peak, model, name) for model in models for name in PEAK_WORDS]


def peak(name: str, row: str, pipe: Any) -> None:
    """Send the smallest cap of a model, and the bytes that PyTorch's allocator and the runtime hold at most in a step."""
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.errors import BudgetError  # noqa: PLC0415

    sys.path.insert(0, str(SUPPORT))
    from compute_models import MODELS, most_held  # noqa: PLC0415
    from named_cap import named_cap  # noqa: PLC0415

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"compute": "fx", "activations": row, **dict.fromkeys(STATES, "device")} | PEAK_WORDS[row]
    if row == "slices of tokens":
        options["compute_shape"] = {"token_tile": "16KiB"}

    def train(cap: int) -> int:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model, batch = MODELS[name][0](), MODELS[name][1]()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model.compile(backend="zero_infinity", options={**options, "device_memory": cap})
        return most_held(model, optimizer, batch)

    try:
        train(1)
    except BudgetError as error:
        least = named_cap(error)
    pipe.send({"model": name, "activations": row, "predicted": least, "measured": train(least)})


# The planner's seconds.


def plan_deep(homes: str, pipe: Any) -> None:
    """Send the CPU seconds in which the memory of 80 layers is decided, on tensors without values; `homes`: of all states."""
    from zinf_compile.backend.decide_memory import Cut  # noqa: PLC0415
    from zinf_compile.cli.models import TARGETS  # noqa: PLC0415
    from zinf_compile.cli.trace import Recorder, Scheduled, run_on_fakes  # noqa: PLC0415
    from zinf_compile.config import Config  # noqa: PLC0415

    warnings.simplefilter("ignore")
    took: list[float] = []

    class Timed(Recorder):
        def _decide_memory(self, cut: Cut) -> None:
            began = time.process_time()
            super()._decide_memory(cut)
            took.append(time.process_time() - began)

    options = {"compute": "fx", "device_memory": "64GiB", "host_memory": "4TiB", "nvme": "/", **dict.fromkeys(STATES, homes)}
    config, found = Config.from_options(options, check_folders=False), list[Scheduled]()
    began = time.process_time()
    run_on_fakes(
        TARGETS["llama-70b"], lambda number: Timed(config, number, found, world_size=8, after=None), world_size=8, device="cuda"
    )
    pipe.send({"homes": homes, "decided_s": sum(took), "all_s": time.process_time() - began, "saved": dict(found[0].saved)})
