"""The part of a save that goes on beside training: parameters and states are written, files are synced, and it is committed.

Note: Background save
    `save` itself writes what may change without a word to the save: whole tensors, gradients, states in memory, and parameters of
    whose memory somebody has another tensor. The rest is written by a thread, or before it changes by who changes it, see Note:
    Pieces that are about to change; or by a deferred step that has still to update it. A save fails with such a step. Rank 0's
    thread waits for the files that describe the others' parts, and commits. Ranks compare how it went at the start of each step
    until all are through, in `wait_for_save` and in the next save.

Note: Room for a save
    To allocate the files beside a drive that is busy with a step's updates takes long, so that the thread does it, where `save`
    itself has nothing to write. Ranks then agree that each has its space, before any of them writes a byte; whoever is about to
    change a piece waits so long. That is the only exchange of these threads, over a control group of their own, once for each
    save on each rank, also on one that has failed by then.

Note: Threads that save
    Threads of one process take turns: one of them is in `save`, `wait_for_save` or at the end of a save, until it returns. What
    goes on in the background is ended by the next one, which has its error then. No lock is held while it goes on, so that
    whoever changes a piece or does a step waits for no other thread's `save`. On several ranks one thread of each makes these
    calls, as collective operations need it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError, RankMismatchError
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.system.accelerator import on_this_device
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.saving import ShardsSave

from .saved_pieces import SavedPieces
from .saved_steps import SavedStep, StepEndedError

_log = logging.getLogger("zinf_compile")

_POLL_S = 0.002
_RUNNING, _DONE, _FAILED, _TOLD = 0.0, 1.0, 2.0, 3.0
"""Of a save on one rank. The last one: it has failed with a step, whose error was raised already."""

_ROOM = "allocating a checkpoint"

_current: list[BackgroundSave] = process_wide([])
"""The save under way, if there is one."""


_turn = threading.RLock()  # entered again by a save of the same thread, as of a signal's handler


def one_at_a_time() -> contextlib.AbstractContextManager[object]:
    """Context in which no other thread of this process is. See Note: Threads that save."""
    return _turn


class Watched(Protocol):
    """What tells a save before it changes."""

    saving: ShardsSave | None


class PartMissingError(CheckpointError):
    """What another rank saves is missing, or has no space."""


class BackgroundSave:
    """A save that goes on in a thread: it writes `pieces`, `finish` ends this rank's part, `commit` makes the whole one of it.

    `commit`, on rank 0 only, is given a function that says whether to give up, which it asks while it waits for other ranks.
    `ended` is called on each rank once all know how it went. `telling`: other optimizers whose steps say that it failed.
    `allocate`, where it is given, on all ranks or on none, is called before anything of the pieces is put. See Note: Room for a
    save.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks | None,
        optimizers: Sequence[Optimizer],
        *,
        telling: Sequence[Optimizer] = (),
        pieces: SavedPieces,
        watched: Iterable[Watched],
        steps: Iterable[SavedStep] = (),
        allocate: Callable[[], None] | None = None,
        finish: Callable[[], None],
        commit: Callable[[Callable[[], bool]], None] | None,
        close: Callable[[], None],
        ended: Callable[[], None],
        name: str,
    ) -> None:
        self._name = name
        self._folder, self._ranks, self._optimizers = folder, ranks, list(optimizers)
        self._telling = [*optimizers, *telling]
        self._pieces, self._watched, self._steps = pieces, list(watched), list(steps)
        self._parts = finish, commit, close
        self._allocate = allocate
        self._apart = None if allocate is None or ranks is None else ranks.apart()
        self._ended = ended
        self._has_written = self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=on_this_device(self._run), name="zinf save", daemon=True)

    def start(self) -> None:
        """Start the thread; where the system gives none, or an interrupt comes before, that is the error of this save."""
        _current.append(self)
        atexit.unregister(_end)
        atexit.register(_end)  # the last one registered is called first: before lanes and engines are closed
        try:
            self._begin()
        except BaseException as error:
            if self._thread.ident is None:
                self._error = error if isinstance(error, RuntimeError) else CheckpointError("it was interrupted as it began")
                self._pieces.stop()
                try:
                    with contextlib.suppress(RuntimeError, CheckpointError):
                        self._make_room(self._error)
                finally:
                    self._close()
            if not isinstance(error, RuntimeError):
                raise

    def _begin(self) -> None:
        for optimizer in self._telling:
            record_of(optimizer).saving = self
        for step in self._steps:  # first: it tells nobody before it changes what it has still to update
            step.begin(self._pieces)
        for each in self._watched:
            each.saving = self._pieces
        self._thread.start()

    def tell(self) -> None:
        """See `StatesSave.tell`."""
        status = _FAILED if self._error is not None else _RUNNING if self._thread.is_alive() else _DONE
        if self._of_ranks(status) != _RUNNING:
            self.end()

    def end(self) -> None:
        """Wait until it is committed on all ranks; raise the error of any of them on all. A collective operation.

        Nothing where another thread has ended it meanwhile.
        """
        with one_at_a_time():
            if self in _current:
                self._end_together()

    def _end_together(self) -> None:
        self._pieces.hurry()
        _poll(lambda: self._has_written)
        ended = self._of_ranks(self._status_at_end())
        self._given_up |= ended != _DONE
        _poll(lambda: not self._thread.is_alive())
        self._forget()
        error, self._error = self._error, None
        try:
            with saving_together(self._ranks, self._folder):
                if isinstance(error, StepEndedError):
                    error.step.raise_failure()  # unless it was raised before
                elif error is not None and not isinstance(error, PartMissingError):  # that rank says why
                    raise error
        finally:
            self._ended()
        for optimizer in self._optimizers if ended == _DONE else ():
            record_of(optimizer).checkpoint = str(self._folder / self._name)

    def end_alone(self, within_s: float) -> None:
        """Wait for it without the other ranks, on rank 0 for at most so many seconds after its own part; log its error."""
        self._pieces.hurry()
        _poll(lambda: self._has_written)
        deadline = time.monotonic() + within_s
        _poll(lambda: not self._thread.is_alive() or time.monotonic() > deadline)
        self._given_up = True
        _poll(lambda: not self._thread.is_alive())
        self._forget()
        if self._error is not None:
            _log.error("no checkpoint was saved in %s: %s", self._folder, self._error)

    def abandon(self) -> None:
        """Let go of it in a forked process, where its thread doesn't exist."""
        self._has_written = True
        self._forget()

    def _forget(self) -> None:
        for optimizer in self._telling:
            record_of(optimizer).saving = None
        for each in self._watched:
            each.saving = None
        if self in _current:
            _current.remove(self)

    def _status_at_end(self) -> float:
        if isinstance(self._error, StepEndedError) and self._error.step.is_told:
            return _TOLD
        return _DONE if self._error is None else _FAILED

    def _of_ranks(self, mine: float) -> float:
        """Return `_FAILED` if any rank is that, else `_TOLD` or `_RUNNING` if any is."""
        try:
            found = [mine] if self._ranks is None else self._ranks.agree(["a checkpoint"], what="ending a save", value=mine)
        except RankMismatchError:  # a rank has died: its part may never come
            self._given_up = True
            raise
        return next((status for status in (_FAILED, _TOLD) if status in found), min(found))

    def _run(self) -> None:
        finish, commit, _ = self._parts
        try:
            self._make_room()
            self._pieces.room_made()
            self._pieces.write_rest()
            finish()
            self._has_written = True
            if commit is not None:
                commit(lambda: self._given_up)
        except BaseException as error:
            self._error = error
            self._pieces.stop()  # nobody waits for room any more
        finally:
            self._close()

    def _make_room(self, error: BaseException | None = None) -> None:
        """Allocate this rank's files, or fail with an error that there is already; return when all ranks have theirs."""
        if self._allocate is None:
            return
        elsewhere = PartMissingError("another rank has no space for its part of a checkpoint")
        with contextlib.nullcontext() if self._apart is None else self._apart.fail_together(_ROOM, elsewhere=elsewhere):
            if error is not None:
                raise error
            self._allocate()

    def _close(self) -> None:
        self._has_written = True
        _, _, close = self._parts
        try:
            close()
        except Exception as error:  # whether it is saved was decided before
            _log.warning("what a save had open in %s could not be closed: %s", self._folder, error)


def wait_for_save() -> None:
    """Wait until the last `save` is on the drive; raise its error, unless that was raised before. A collective operation.

    The next save and the end of the process wait, too. The error is raised on all ranks, once, here or at the start of the next
    step; training goes on as if nothing had been saved, and the checkpoint before stands.
    """
    with one_at_a_time():
        while _current:
            _current[0].end()


def wait_alone() -> None:
    """Wait for a save under way without the other ranks: its error is only logged."""
    while _current:
        save = _current[0]
        save.end_alone(60.0 if save._ranks is None else save._ranks.timeout_s)


def _end() -> None:
    wait_alone()


def _poll(done: Callable[[], bool]) -> None:
    """Wait without a lock that Ctrl-C may leave locked."""
    while not done():
        time.sleep(_POLL_S)


def saving_together(ranks: Ranks | None, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Context whose errors are raised on all ranks; the others name the folder and the first rank that failed."""
    if ranks is None:
        return contextlib.nullcontext()
    return ranks.fail_together(
        "saving a checkpoint", elsewhere=lambda told: CheckpointError(f"no checkpoint is saved in {os.fspath(folder)}: {told}")
    )


def _forked() -> None:
    global _turn  # noqa: PLW0603  (that of its parent may be locked for ever)
    _turn = threading.RLock()
    for save in list(_current):
        save.abandon()


os.register_at_fork(after_in_child=_forked)
