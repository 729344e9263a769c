"""Exceptions and warnings for users. Each message says what was found, where, what is accepted and what to do next."""

from __future__ import annotations


class ZinfError(Exception):
    """Root of every error this package raises on purpose."""


class OptionError(ZinfError, ValueError):
    """An option of `torch.compile(..., options=...)` is unknown, has a bad value, or differs between ranks."""


class UnsupportedModelError(ZinfError, ValueError):
    """The model has a part or an operation that can't be partitioned; the message names the parameter and a remedy."""


class CheckpointError(ZinfError, ValueError):
    """A checkpoint doesn't fit the model, or is damaged; the message names every tensor concerned."""


class CompilationError(ZinfError, RuntimeError):
    """Inductor can't compile a region, and option `on_refusal` is "error"; the message ends with Inductor's."""


class PartitionedParameterError(ZinfError, RuntimeError):
    """Code outside the compiled graphs read or replaced a parameter whose value is partitioned over the ranks."""


class UnsupportedOptimizerError(ZinfError, TypeError):
    """The optimizer does not update element by element, so it cannot work on shards."""


class StepFailedError(ZinfError, RuntimeError):
    """A step of an optimizer failed partway; the message says whether the state before it is intact."""


class BudgetError(ZinfError, MemoryError, RuntimeError):
    """An operation needs more memory than is available; the message says how much, and what to do.

    A `RuntimeError`, as PyTorch's errors of that kind are: loops that look for a batch size that fits take it for one, where the
    message says that this batch is out of memory.
    """


class PlanError(ZinfError, ValueError):
    """A problem or a plan makes no sense, or the plan does not fit the problem; the message names what is wrong."""


class RankMismatchError(ZinfError, RuntimeError):
    """The ranks differ in options or in the order of collectives, or one doesn't answer in time."""


class IllegalGraphError(ZinfError, AssertionError):
    """A pass produced an illegal schedule: a defect of this package, found before anything runs."""


class StoreError(ZinfError, OSError):
    """A drive, its filesystem or its quota failed: `errno` is the error, `filename` the folder.

    The message names extent, file and offset.
    """

    def __str__(self) -> str:
        """Return errno and message. The message names the folder."""
        return super().__str__() if self.errno is None else f"[Errno {self.errno}] {self.strerror}"


class StoreRequestError(ZinfError, ValueError):
    """An invalid request to the store: an unknown extent, a range or tensor that doesn't fit, after `close`."""


class StoreWarning(UserWarning):
    """The folder for states works, but isn't on a drive."""
