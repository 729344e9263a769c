"""A model on meta that a checkpoint is about to be loaded onto: partitioned first, by the options that it was compiled with.

Called by `load`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zinf_compile._torch import backends_of
from zinf_compile.checkpoint.gathered import state_names
from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.context import context_for
from zinf_compile.runtime.system.host_limits import warn_of_caps
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.budget_checks import capped

from .from_meta import collect, initialized, random_numbers_of_rank_0, steps_before
from .initializers import explain_untouched

_BACKEND = "zero_infinity"


class OntoMeta:
    """A compiled model on meta, see `MetaModel` in `checkpoint/load.py`.

    Raises `UnsupportedModelError` where it is not known by which options to partition it, and for what `partition` refuses.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        given = _options_of(model)
        self._config = Config.from_options(given.get("options"), mode=given.get("mode"))
        self._model, self._device = plain(model), device
        self._targets = collect(self._model, device)
        group, signature = self._config.resolve_group(), self._config.signature()
        self._context = context_for(group, device, timeout_s=self._config.timeout_s, signature=signature)

    @property
    def ranks(self) -> Ranks:
        """The ranks that it is going to be partitioned over."""
        return self._context.ranks

    @contextlib.contextmanager
    def partitioned(self) -> Iterator[None]:
        """Partition it for values that are loaded inside the `with` block. After an error there it is on meta as before."""
        model, context = self._model, self._context
        warn_of_caps(self._config, self._device)
        install()
        steps = list(steps_before(model, None, loads=True))
        with contextlib.ExitStack() as undo:
            undo.enter_context(capped(self._config, [target.slot for target in self._targets], context))
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
                undo.enter_context(random_numbers_of_rank_0(context))
                made = undo.enter_context(initialized(model, self._targets, steps, self._config, context, once=False))
                loaded = state_names(model)
                missing = [name for name in made.buffers.untouched() if name not in loaded]
                described = [f"{target.name} {list(target.slot.shape)} {target.slot.dtype}" for target in self._targets]
                context.ranks.agree([*missing, *described], what="comparing the ranks' models, which every rank makes alike")
                if missing:
                    raise explain_untouched(model, missing)
                for parameter in made.parameters:
                    made.materializer.forget(parameter)
                made.partition(self._device)
                context.memory.gather_memory.clear()
            yield
            made.keep()


def is_on_meta(model: nn.Module) -> bool:
    """Say whether a parameter of a model is on meta."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def _options_of(model: nn.Module) -> dict[str, Any]:
    """Return what `torch.compile` was given for the model, or alike for modules of it."""
    found = [arguments for name, arguments in backends_of(model) if name == _BACKEND]
    if not found:
        raise UnsupportedModelError(
            f"the model is on meta, and was not compiled with backend={_BACKEND!r}, whose options say where its values go: "
            "compile it before (by torch.compile: give load() what that returned), or call zinf_compile.partition(model, "
            "checkpoint=FOLDER, ...) with these options; nothing was changed"
        )
    if any(arguments != found[0] for arguments in found):
        raise UnsupportedModelError(
            "the model is on meta, and its modules were compiled with different options: call zinf_compile.partition(model, "
            "checkpoint=FOLDER, ...) with those that say where its values go; nothing was changed"
        )
    return found[0]
