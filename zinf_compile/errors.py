"""Exceptions and warnings for users. Each message says what was found, where, what is accepted and what to do next."""

from __future__ import annotations


class ZinfError(Exception):
    """Root of every error this package raises on purpose."""


class OptionError(ZinfError, ValueError):
    """An option of `torch.compile(..., options=...)` is unknown, has a bad value, or differs between ranks."""


class UnsupportedModelError(ZinfError, ValueError):
    """The model holds or does something that cannot be partitioned; the message names the parameter and a remedy."""


class CheckpointError(ZinfError, ValueError):
    """A checkpoint doesn't hold what the model needs, or isn't whole; the message names every tensor at fault."""


class CompilationError(ZinfError, RuntimeError):
    """Inductor can't compile a part of the model, and `on_refusal="error"` asks for an error; the message ends with its own."""


class PartitionedParameterError(ZinfError, RuntimeError):
    """Code outside the compiled graphs read or replaced a parameter whose value is partitioned over the ranks."""


class UnsupportedOptimizerError(ZinfError, TypeError):
    """The optimizer does not update element by element, so it cannot work on shards."""


class StepFailedError(ZinfError, RuntimeError):
    """A step of an optimizer failed partway; the message says whether the state before it is intact."""


class BudgetError(ZinfError, MemoryError):
    """An operation needs more memory than is available; the message says how much, and what to do."""


class RankMismatchError(ZinfError, RuntimeError):
    """The ranks are not doing the same thing: other options, another sequence of collectives, or no answer in time."""


class IllegalGraphError(ZinfError, AssertionError):
    """A pass produced an illegal schedule: a defect of this package, found before anything runs."""


class StoreError(ZinfError, OSError):
    """A drive, its filesystem or its quota failed the store: `errno` says how, `filename` in which folder.

    The message names extent, file and offset.
    """

    def __str__(self) -> str:
        """Show errno and message, which names the folder itself."""
        return super().__str__() if self.errno is None else f"[Errno {self.errno}] {self.strerror}"


class StoreRequestError(ZinfError, ValueError):
    """An invalid request to the store: an unknown extent, a range or tensor that doesn't fit, after `close`."""


class StoreWarning(UserWarning):
    """States are stored in a folder that works, but isn't on a drive."""
