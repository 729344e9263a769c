"""Parts of a model that can't be saved through its `state_dict()`: reported at the first step, not at the first save."""

from __future__ import annotations

import logging
import weakref

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.fetch import shortage

_log = logging.getLogger("zinf_compile")

_said: weakref.WeakKeyDictionary[Context, set[str]] = process_wide(weakref.WeakKeyDictionary())


def warn_of_saving(context: Context) -> None:
    """Log a warning, once, where the ranks' `state_dict()` will raise, or where reading its largest value will."""
    for problem, text in _problems(context):
        said = _said.setdefault(context, set())
        if problem not in said:
            said.add(problem)
            _log.warning("%s", text)


def _problems(context: Context) -> list[tuple[str, str]]:
    if context.size > 1:
        text = (
            f"this model is spread over {context.size} ranks: model.state_dict(), and what saves through it (save_pretrained, "
            "Lightning, accelerate, peft), raises. Save with zinf_compile.full_state_dict(model) or "
            "zinf_compile.save_safetensors(model, folder), called on all ranks"
        )
        return [("ranks", text)] if context.rank == 0 else []
    offloaded = [unit for unit in context.units if unit.backing is not None]
    if not offloaded:
        return []
    largest = max(offloaded, key=lambda unit: unit.bytes)
    ledgers = [context.memory.ledger]
    if context.link.topology.host_apart and largest.resident is None:
        ledgers.append(context.memory.host_ledger)
    return [
        (largest.name, f"model.state_dict() can be read, and the model saved through it, only with a higher cap: {short}")
        for ledger in ledgers
        if (short := shortage(largest, ledger))
    ]
