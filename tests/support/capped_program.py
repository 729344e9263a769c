"""Train an 83M GPT in bf16 with fp32 masters for two steps, on one batch; say the losses and save the model.

python capped_program.py nvme FOLDER CAP     # partitioned at birth to FOLDER, within CAP bytes of RLIMIT_DATA
python capped_program.py memory FOLDER 0     # built whole, all states in memory
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from typing import Any

import torch

import zinf_compile
from zinf_compile.cli.models import GPT

SIZE = {"layers": 4, "width": 1152, "heads": 9, "vocabulary": 17001, "length": 64}
"""A fortieth of the 3.1B of benchmarks/capacity.py."""
PIECE_NUMEL = 1 << 21
"""Elements of a piece: smaller with the model, as chunks of the optimizer's step are in memory."""


def main(where: str, folder: str, cap: int) -> None:
    """Do it."""
    warnings.simplefilter("ignore", zinf_compile.StoreWarning)
    torch.set_num_threads(2)  # each has a stack that counts
    if cap:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # as if made in that type: values are drawn in the type that they have
    options: dict[str, Any] = {
        "master": "float32",
        "reduce_dtype": "bfloat16",
        "compute": "fx",
        "compute_shape": {"piece_numel": PIECE_NUMEL},
        "tile": "8MiB",
    }  # what device_memory makes it
    if where == "nvme":
        options |= dict.fromkeys(("params", "grads", "optimizer"), "nvme") | {"nvme": folder, "device_memory": "128MiB"}
        with torch.device("meta"):
            model = GPT(**SIZE)
        zinf_compile.partition(model, init=_scale_down, **options)
    else:
        model = GPT(**SIZE).apply(_scale_down)
    torch.set_default_dtype(torch.float32)
    call = torch.compile(model, backend="zero_infinity", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = torch.randint(SIZE["vocabulary"], (2, 1, SIZE["length"]), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        loss = call(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zinf_compile.save_safetensors(model, folder, file_bytes="64MiB")
    print(json.dumps(losses))


def _scale_down(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
