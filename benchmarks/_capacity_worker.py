"""Train a GPT for a few steps within a memory cap, as a peer of benchmarks/capacity.py: a process that may be killed.

    python _capacity_worker.py SETTINGS    # as JSON what `Settings` names; prints a line of JSON per step, and one at the end

DeepSpeed's interpreter runs it too, without zinf_compile: the model's class is read from its file.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from deepspeed_infinity import ROOT, load
from deepspeed_infinity import config as deepspeed_config

Step = Callable[[], Any]
"""Takes a step on the one batch that there is; returns its loss."""


class Settings(TypedDict):
    """Settings from capacity.py."""

    peer: str
    model: dict[str, int]
    cap: int
    steps: int
    folder: str
    rank: int
    world: int


def main() -> None:
    """Train and print the results."""
    settings = Settings(**json.loads(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (settings["cap"],) * 2)
    rank, world = str(settings["rank"]), str(settings["world"])
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHINDUCTOR_CACHE_DIR": f"{settings['folder']}/cache-{rank}"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is, which DeepSpeed builds with
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings["world"]))
    if settings["world"] > 1 or settings["peer"] in ("fsdp2", "deepspeed nvme"):
        store = f"file://{settings['folder']}/rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=settings["rank"], world_size=settings["world"])
    torch.manual_seed(0)
    began = time.perf_counter()
    step = _PEERS[settings["peer"]](settings)
    _say(built_s=time.perf_counter() - began)
    for _ in range(settings["steps"]):
        began = time.perf_counter()
        loss = float(step())
        _say(loss=loss, step_s=time.perf_counter() - began)
    _say(over=True, threads=torch.get_num_threads())


def _batch(settings: Settings) -> Any:
    import torch  # noqa: PLC0415

    size = (2, 1, settings["model"]["length"])
    return torch.randint(settings["model"]["vocabulary"], size, generator=torch.Generator().manual_seed(settings["rank"]))


def _gpt(settings: Settings) -> Any:
    """Build the model with the embedding's usual scale: torch's own, 1, would saturate the loss."""
    import torch  # noqa: PLC0415

    model = load("targets", ROOT / "zinf_compile" / "cli" / "models.py").GPT(**settings["model"])
    if not model.wte.weight.is_meta:
        torch.nn.init.normal_(model.wte.weight, std=0.02)
    return model


def _stepping(call: Any, optimizer: Any, settings: Settings, around: Callable[[], Any] = contextlib.nullcontext) -> Step:
    tokens, targets = _batch(settings)

    def step() -> Any:
        with around():
            loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _eager(settings: Settings) -> Step:
    import torch  # noqa: PLC0415

    model = _gpt(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _stepping(model, optimizer, settings, lambda: torch.autocast("cpu", torch.bfloat16))


def _fsdp2(settings: Settings) -> Step:
    import torch  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    model = _gpt(settings)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _stepping(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), settings)


def _zinf(settings: Settings) -> Step:
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415

    def small(module: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)

    places = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
    options: dict[str, Any] = {**places, "nvme": settings["folder"], "master": "float32", "device_memory": settings["cap"] // 3}
    options["reduce_dtype"] = "bfloat16"  # as FSDP2's policy above has it
    with torch.device("meta"):
        model = _gpt(settings).to(torch.bfloat16)
    zinf_compile.partition(model, init=small, **options)
    call = torch.compile(model, backend="zero_infinity", options={"device_memory": options["device_memory"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _stepping(call, optimizer, settings)


def _deepspeed(settings: Settings) -> Step:
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415

    config = deepspeed_config({**settings, "batch": 1, "offload": ["params", "optimizer"], "forward": False, "threads": 0})
    config["bf16"] = {"enabled": True}
    config["zero_optimization"] |= {"sub_group_size": 10_000_000, "reduce_bucket_size": 10_000_000}
    config["zero_optimization"] |= {"stage3_max_live_parameters": 10_000_000}
    config["zero_optimization"]["offload_param"]["buffer_count"] = 2  # the fewest with which these settings work
    config["zero_optimization"]["offload_optimizer"] |= {"buffer_count": 4, "pipeline_read": False}
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = load("targets", ROOT / "zinf_compile" / "cli" / "models.py").GPT(**settings["model"])
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    tokens, targets = _batch(settings)

    def step() -> Any:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


_PEERS: dict[str, Callable[[Settings], Step]] = {
    "eager": _eager,
    "fsdp2": _fsdp2,
    "zinf nvme": _zinf,
    "deepspeed nvme": _deepspeed,
}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
