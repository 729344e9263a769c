"""A loop over chunks that an error interrupted, and that lives until the process ends, ends with it in silence."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import contextlib
from types import SimpleNamespace
from zinf_compile.optim.offloaded_states import OffloadedStates

meter = SimpleNamespace(waiting=contextlib.nullcontext)
states = SimpleNamespace(
    gradients={}, _forward=True, _ahead=set(), _order=lambda: [0, 1], chunks=[SimpleNamespace(numel=1)] * 2,
    context=SimpleNamespace(lanes=SimpleNamespace(meter=meter)),
    transfers=SimpleNamespace(buffers=[0, 0], drain=lambda: print("drained")),
    _route=SimpleNamespace(device_apart=False),
    _prepare=lambda number, optimizer: None,
    _bring=lambda numbers, ready, optimizer: [(n, SimpleNamespace(drain=lambda: None, held=False)) for n in numbers],
    _expect=lambda due: contextlib.ExitStack(),
    _offer=lambda number, buffer: None,
    _lies_ready=lambda number: False, _joins=lambda number, optimizer: False,
    _due_of=lambda number: [], _arrival=lambda number: 0,
)
chunks = OffloadedStates.load_chunks(states, None)
print(next(chunks)[0][0])
__builtins__.kept = chunks  # as an error's traceback would keep it, until modules are gone
"""


def test_chunks_that_live_until_the_process_ends() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["0"], "nothing is waited for: drives are closed by then"
