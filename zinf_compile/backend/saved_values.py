"""Space on drives for the values that a graph saves there. Called by `graph_compiler`."""

from __future__ import annotations

from zinf_compile._torch import activation_budget
from zinf_compile.errors import OptionError, StoreError
from zinf_compile.ir.program import Program
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.storage.value_space import ValueSpace


def refuse_activation_budget() -> None:
    """Raise `OptionError` where PyTorch is told to save less: what it would compute again is decided by our passes, too."""
    found = activation_budget()
    if found != 1.0:
        raise OptionError(
            f"torch._functorch.config.activation_memory_budget={found:g}: not supported by backend 'zero_infinity', whose passes "
            "already say what is saved; accepted: 1.0, the default. Use option activations='host' or 'nvme' to move what is "
            "saved, or torch.utils.checkpoint in the model to save less"
        )


class SavedSpace:
    """Space on drives for the values that a graph saves there; none where it saves nothing."""

    def __init__(self, program: Program, context: Context, folders: tuple[str, ...]) -> None:
        on_drives = [(Tier(tier), size) for tier, size in program.leaving if not Tier(tier).in_memory]
        self._space = context.value_space(on_drives[0][0], folders) if on_drives else None
        self._sizes = [size for _, size in on_drives if size]

    def reserve(self) -> tuple[ValueSpace | None, StoreError | None]:
        """See that there is space for one run more; return where, and the error of drives that have no room."""
        try:
            if self._space is not None:
                self._space.reserve(self._sizes)
        except StoreError as error:
            return self._space, error
        return self._space, None
