"""Exchanges of small values between ranks: comparing, sharing, and failing on all ranks together.

On the host, over a control group of their own; `collectives` moves shards and gradients.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import json
import os
import pickle
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zinf_compile._torch import level_group_names, without_python_dispatcher
from zinf_compile.errors import OptionError, RankMismatchError
from zinf_compile.ir.program import digest_of

from .differences import ENDING, first_difference
from .error_notes import ErrorNotes
from .shard_group import ShardGroup
from .steps_done import StepDone, describe, mixed

_LISTENING = datetime.timedelta(seconds=2)
"""How long a rank waits for others before it looks whether one has left a note of an error."""

_END_WITHIN_S = 10.0
"""Seconds that a rank that ends waits for the others."""

_CLOSED = re.compile(r"closed|reset by peer|broken pipe|refused", re.IGNORECASE)
"""Words in the messages of transfers to a process that has ended, or has given up."""

_TRANSPORT = re.compile(r"gloo|nccl|ucc|mpi\b|tcp|socket|connection|peer|timed? ?out", re.IGNORECASE)
"""Words in the messages of broken transfers, which have no class of their own."""


class Ranks:
    """The ranks that share a model: this one's number, how many they are, and what they do in the same order.

    They form a `ShardGroup`, the one of units that are cut over all of them; `of` has those of others. `waiting` notes when
    compute stands still. Creating one is a collective operation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float,
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        members = dist.get_process_group_ranks(group) if group is not None else [0]
        self.shard_group = ShardGroup.over(members, members[self.rank])
        """All of these ranks."""
        self._of: dict[tuple[int, ...], Ranks] = {self.shard_group.partition: self}
        """`Ranks` by the ranks that hold a unit's shards."""
        self.timeout_s = timeout_s
        self.connected = group is not None and self.size > 1 and dist.get_backend(group) != "fake"
        """Whether there are other ranks to speak with."""
        self._waiting = waiting
        self._signatures: set[str] = set()
        self._options = [""]
        """Those of the last compilation; one list for all `Ranks` that are made of these."""
        self._process = os.getpid()
        self._differed = False
        """Whether the last comparison of these ranks ended in an error."""
        self._members: list[int] = []
        self._control: dist.ProcessGroup | None = None
        self._notes: ErrorNotes | None = None
        self._apart: Ranks | None = None
        self.groups: list[dist.ProcessGroup] = []
        """Process groups made of these ranks."""
        if group is not None and self.connected:
            self._members = members
            if self._are_some:
                self.patiently(lambda: level_group_names(group), "starting")
            self._control = self.new_group("gloo")
            self._notes = ErrorNotes(self._control, rank=self.rank, size=self.size)

    @property
    def _are_some(self) -> bool:
        """Whether the process has other ranks besides."""
        return len(self._members) < dist.get_world_size()

    def of(self, group: ShardGroup) -> Ranks:
        """Return the ranks that hold the shards of a group's units: what these compare, exchange and share.

        Made at the first call for a set of ranks, together, with a process group of their own; of these ranks all make that call,
        each for the set that it belongs to.
        """
        found = self._of.get(group.partition)
        if found is None:
            found = self._of[group.partition] = self._some(group)
        return found

    def _some(self, group: ShardGroup) -> Ranks:
        assert set(group.partition) <= set(self.shard_group.partition), "a unit is cut over ranks of its model"
        if self.connected:
            assert self._control is not None, "there are others"
            level_group_names(self._control)
        some = copy.copy(self)  # their groups count among these ranks'
        some.rank, some.size, some.shard_group = group.rank, group.size, group
        some.connected = self.connected and group.size > 1
        some._members, some._control, some._apart = list(group.partition), None, None
        if some.connected:
            some._control = some.new_group("gloo")
        return some

    def apart(self) -> Ranks:
        """Return the same ranks with a control group of their own, for a thread that exchanges beside the main one.

        Made at the first call, together. One thread at a time may use it, in the same order on all ranks; what it waits for there
        is not time that compute stands still.
        """
        if not self.connected:
            return self
        if self._apart is None:
            some = copy.copy(self)
            some._control = self.new_group("gloo")
            some._notes, some._waiting = None, contextlib.nullcontext  # a note counts the exchanges of the other group
            self._apart = some
        return self._apart

    def new_group(self, backend: str) -> dist.ProcessGroup:
        """Return another group of these ranks. A collective operation."""
        made: list[object] = []
        timeout = datetime.timedelta(seconds=self.timeout_s)
        self.patiently(
            lambda: made.append(
                dist.new_group(self._members, timeout=timeout, backend=backend, use_local_synchronization=self._are_some)
            ),
            "starting (the others never called a compiled model)",
        )
        assert isinstance(made[0], dist.ProcessGroup)
        self.groups.append(made[0])
        return made[0]

    def admit(self, signature: str) -> None:
        """Check, the first time these options are used, that all ranks use them."""
        self._options[0] = f"options {signature}"
        if signature not in self._signatures:
            self.agree([f"options {signature}"], what="starting", mismatch=OptionError)
            self._signatures.add(signature)

    def agree(
        self,
        lines: Sequence[str],
        *,
        what: str,
        digest: int | None = None,
        details: Callable[[], Sequence[str]] = tuple,
        value: float = 0.0,
        mismatch: type[Exception] = RankMismatchError,
        within_s: float | None = None,
    ) -> list[float]:
        """Check that all ranks are about to do the same, and exchange one number with that.

        16 bytes per rank on the control group: a hash of `lines`, or `digest`, and `value`. On a mismatch all ranks raise, naming
        the first line that differs, or the first of `details`, which only then are asked for. Waits `within_s` seconds, by
        default as long as option `timeout_s` says. Returns every rank's value.
        """
        if self._control is None:
            return [value]
        mine = digest_of(lines) if digest is None else digest
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        self._differed = True
        everyone = self._gather(torch.tensor([mine, bits]), f"{what} ({lines[0]})" if lines else what, within_s)
        digests, values = zip(*(pair.tolist() for pair in everyone), strict=True)
        if any(other != mine for other in digests):
            text = json.dumps([what, self._options[0], *lines, *details()]).encode()
            comparing = f"{what} (comparing ranks)"
            sizes = torch.cat(self._gather(torch.tensor([len(text)]), comparing, within_s)).tolist()
            padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
            described = [json.loads(bytes(row.tolist())) for row in self._gather(padded, comparing, within_s)]
            raise mismatch(first_difference(described))
        self._differed = False
        return [struct.unpack("<d", struct.pack("<q", other))[0] for other in values]

    def _gather(self, mine: torch.Tensor, what: str, within_s: float | None) -> list[torch.Tensor]:
        """Return every rank's tensor, of one size on all. Works after `destroy_process_group`, too: at the end of a process."""
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        group = self._control
        assert group is not None, "there are others"

        def exchange() -> None:
            work = group.allgather([everyone], [mine])
            if within_s is None:
                self._wait_or_hear(work)
            else:
                _keep_for_good(work)
                work.wait(datetime.timedelta(seconds=within_s))

        self.patiently(exchange, what)
        if self._notes is not None:
            self._notes.exchanges += 1
        return everyone

    def _wait_or_hear(self, work: dist.Work) -> None:
        """Wait for an exchange; raise what ends it, or as soon as another rank has left a note that it doesn't come."""
        start = time.monotonic()
        while True:
            try:
                work.wait(_LISTENING)
                return
            except RuntimeError:  # of a time-out, after which one may wait again, or of the exchange
                overdue = time.monotonic() - start > self.timeout_s + _LISTENING.total_seconds()
                if work.is_completed() or overdue or (self._notes is not None and self._notes.read()):
                    raise

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Context whose error is told to ranks that wait for this one, see `tell`."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Leave a note of an error that may be this rank's alone: the others then say so, instead of that it doesn't answer."""
        if self._notes is not None and not isinstance(error, RankMismatchError):
            self._notes.leave(error)

    def exchange(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return every rank's `values` (a vector of doubles), stacked by rank."""
        if self._control is None:
            return values.unsqueeze(0)
        if values.numel() == 1:  # fits into the check itself
            return torch.tensor(self.agree([what], what=what, value=float(values)), dtype=torch.float64).unsqueeze(1)
        self.agree([f"{what} of {values.numel()} values"], what=what)
        out = [torch.empty(values.numel(), dtype=torch.float64) for _ in range(self.size)]
        mine = values.to("cpu", torch.float64)
        self.patiently(lambda: dist.all_gather(out, mine, group=self._control), what)
        return torch.stack(out)

    def share(self, value: Any, *, what: str, source: int = 0) -> Any:
        """Return one rank's value on every rank; what can't be pickled is an error on all of them."""
        if self._control is None:
            return value
        shared: list[bytes] = [b""]
        with self.fail_together(what, elsewhere=RankMismatchError(f"{what} failed on rank {source}, see there")):
            if self.rank == source:
                shared[0] = pickle.dumps(value)
        self.patiently(lambda: dist.broadcast_object_list(shared, group_src=source, group=self._control), what)
        return pickle.loads(shared[0])

    @contextlib.contextmanager
    def fail_together(self, what: str, *, elsewhere: Exception | Callable[[str], Exception] | None = None) -> Iterator[None]:
        """Raise on all ranks what the block raises on one: there as it is, on the others `elsewhere`. Collective.

        By default that is a `RankMismatchError` naming the first rank that failed. A function is given that rank's message.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:  # an interrupt too: the others are about to wait here
            error = raised
        if callable(elsewhere):
            told = self.problem_of_any("" if error is None else str(error) or repr(error), what=what)
            if error is None and told:
                raise elsewhere(told)
        else:
            ranks = self._ranks_that(error is not None, what)
            if error is None and ranks:
                text = f"{what} failed on rank {ranks[0]}, see there; the model is what it was"
                raise elsewhere or RankMismatchError(text)
        if error is not None:
            raise error

    def problem_of_any(self, mine: str, *, what: str) -> str:
        """Return this rank's problem or, where it has none, that of the first rank with one; empty where none has. Collective."""
        ranks = self._ranks_that(bool(mine), what)
        if not ranks:
            return ""
        first = self.share(mine, what=f"{what}: what is wrong", source=ranks[0])
        return mine or f"named on rank {ranks[0]}: {first}"

    def _ranks_that(self, mine: bool, what: str) -> list[int]:
        """Return the ranks on which something is so. Collective."""
        return [rank for rank, value in enumerate(self.agree([what], what=what, value=float(mine))) if value]

    def compare_at_end(self, digest: int, last_step: StepDone | None) -> None:
        """Raise `RankMismatchError` where the last steps were not taken by all ranks, or other ranks go on; the process ends.

        Not after an error, which says enough: others are told of one that ends this process. And not in a forked child, which
        shares its parent's connections. A rank that does not end within `_END_WITHIN_S` seconds of this one is left to itself.
        """
        if self._control is None or os.getpid() != self._process:
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self.tell(error)
        if error is not None or self._differed:
            return
        try:
            self.agree(
                [ENDING],
                what=ENDING,
                digest=mixed(digest_of([ENDING]), digest),
                details=lambda: describe([last_step], digest),
                within_s=_END_WITHIN_S,
            )
        except RankMismatchError as differs:
            left_alone = isinstance(differs.__cause__, RuntimeError | dist.DistError)  # by ranks that ended otherwise
            if not left_alone:
                raise

    def failed(self, what: str, error: BaseException) -> RankMismatchError:
        """Turn a broken or timed-out transfer into the error a user can act on."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        told = "" if self._notes is None else self._notes.read()
        cause = "the connection is closed" if _CLOSED.search(reason) else f"time-out {self.timeout_s:g} s (option timeout_s)"
        why = (
            f": {told}. See that error; all ranks have to go back to the same point, or start again."
            if told
            else f"; {cause}. Usually a rank ended, took another branch of the model or ran out of batches: every rank must run "
            "the same graphs in the same order."
        )
        return RankMismatchError(
            f"rank {self.rank} of {self.size} got no answer from another rank while {what}{why} The transport said: {reason}"
        )

    def explain(self, error: RuntimeError, what: str) -> RuntimeError:
        """Return the error of a transfer, called `what`, that failed: a broken connection is a `RankMismatchError`."""
        if _TRANSPORT.search(str(error)) or isinstance(error, dist.DistError):
            return self.failed(what, error)
        return RuntimeError(f"rank {self.rank} of {self.size} failed while {what}: {error}")

    def patiently(self, exchange: Callable[[], object], what: str) -> None:
        """Call what waits for other ranks; raise `RankMismatchError`, which names `what`, where one doesn't answer.

        While AOTAutograd traces, PyTorch's Python dispatcher holds the GIL until gloo has taken the exchange; gloo takes it under
        a lock that its thread may hold while it waits for the GIL, to free the tensors of the exchange before.
        """
        try:
            with self._waiting(), without_python_dispatcher():
                exchange()
        except (RuntimeError, dist.DistError) as error:
            raise self.failed(what, error) from error


def _keep_for_good(work: dist.Work) -> None:
    """Never let go of an exchange and its tensors: the process ends.

    gloo's thread holds them a little longer than its caller waits. Letting go of tensors that Python has seen takes the
    interpreter's lock, and a thread that asks for it while the interpreter ends aborts the process. [torch 2.13]
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
