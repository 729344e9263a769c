"""DeepSpeed's ZeRO-Infinity on one process of the CPU, as a peer of benchmarks/offload.py; README.md says how to install it.

    python deepspeed_infinity.py DESCRIPTOR SETTINGS    # a connection to offload.py, and as JSON what `Settings` names

It runs in an environment of its own, without zinf_compile: the model's class is read from its file.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parents[2]


class Settings(TypedDict):
    """What offload.py decides."""

    model: dict[str, int]
    batch: int
    offload: list[str]
    forward: bool
    folder: str
    threads: int


def config(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's configuration: what is offloaded lies on the drive and nowhere else.

    By default it would keep up to 1e9 parameters in memory (max_in_cpu, max_live_parameters, max_reuse_distance). It always keeps
    what is smaller than 1 MiB or a block of `aio`: with blocks of 8 MiB the projections would stay in memory.
    Tried at 4 layers of width 1024 and 1,024 tokens to a step, two steps each, seconds, one after the other on two cores:

        blocks of 1 MiB                                                                 4.95
        blocks of 4 MiB                                                                 5.62
        blocks of 4 MiB, reduce_bucket_size as here                                     5.72
        blocks of 4 MiB, pipeline_read with 10 optimizer buffers                        4.78
        blocks of 4 MiB, prefetching 60M elements with 10 parameter buffers             5.36

    So pipeline_read is on; together with blocks of 1 MiB it ran at full size only. pipeline_write, two threads for I/O,
    single_submit and prefetching of 10M elements work too, but ran on a machine that was busy otherwise: not compared.
    """
    largest = settings["model"]["vocabulary"] * settings["model"]["width"]
    nvme = {"device": "nvme", "nvme_path": settings["folder"]}
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 2 * largest,
        "sub_group_size": largest,
        "reduce_bucket_size": largest,
    }
    if "params" in settings["offload"]:
        zero["offload_param"] = nvme | {"buffer_size": largest, "buffer_count": 5, "max_in_cpu": 0}
    if not settings["forward"] and "optimizer" in settings["offload"]:
        zero["offload_optimizer"] = nvme | {"buffer_count": 8, "pipeline_read": True}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings["batch"],
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1},
    }
    if not settings["forward"]:
        found["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    return found


def trainer(model: Any, settings: Settings) -> Any:
    """Return what takes a step of `model`."""
    import deepspeed  # noqa: PLC0415  (once the environment is set)
    import torch  # noqa: PLC0415

    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # of the collectives that it calls, by their older names
    parameters = {} if settings["forward"] else {"model_parameters": model.parameters()}
    # Partitioned here, the parameters stay in fp32. `initialize` would make them bf16 on processors without arithmetic in fp16,
    # whatever it is told, and then fail at the first product. [deepspeed 0.19.8]
    deepspeed.zero.Init(module=model, config_dict_or_path=config(settings))
    engine, *_ = deepspeed.initialize(model=model, config=config(settings), **parameters)

    def take(tokens: Any, targets: Any) -> Any:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def forward(tokens: Any, targets: Any) -> Any:
        with torch.no_grad():
            return engine(tokens, targets)

    return forward if settings["forward"] else take


def main() -> None:
    """Build the model and serve."""
    commands, settings = Connection(int(sys.argv[1])), Settings(**json.loads(sys.argv[2]))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "passive"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is, which builds its operators
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo", init_method=f"file://{settings['folder']}/rendezvous", rank=0, world_size=1)
    torch.manual_seed(0)
    model = load("targets", ROOT / "zinf_compile" / "cli" / "models.py").GPT(**settings["model"])
    torch.nn.init.normal_(model.wte.weight, std=0.02)  # torch's own, 1, would saturate the loss
    generator = torch.Generator().manual_seed(0)
    shape = (2, settings["batch"], settings["model"]["length"])

    def draw() -> Any:
        return torch.randint(settings["model"]["vocabulary"], shape, generator=generator)

    load("_worker", ROOT / "benchmarks" / "_worker.py").serve(commands, draw, lambda: trainer(model, settings))


def load(name: str, path: Path) -> ModuleType:
    """Import a file, whatever is installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
