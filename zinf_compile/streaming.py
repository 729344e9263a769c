"""Optimizer states that live on drives: a step takes them chunk by chunk, while the next is read and the last one written."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import BudgetError, UnsupportedOptimizerError
from .parameter import ShardedParameter
from .probe import states_kept
from .runtime.cgroups import available_memory_bytes
from .runtime.chunk_states import ChunkSpec, ChunkStates
from .runtime.chunks import ALIGN, Piece, chunk_end, cut_chunks
from .shard_state import kept_state, local_gradient, shard_state

_log = logging.getLogger("zinf_compile")

CHUNK_NUMEL = 4 << 20
"""Elements of a chunk: large enough for a drive's full speed, small beside what a process has."""

Kept = Mapping[str, torch.dtype]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    spec: ChunkSpec
    pieces: tuple[tuple[ShardedParameter, Piece], ...]


class StreamedStates:
    """The states of some parameters of one optimizer, on drives.

    `optimizer.state` keeps what is not of a parameter's size, such as step counts; the rest is there only while `state_dict` is
    taken.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter], kept: Sequence[Kept]) -> None:
        self._kept = dict(zip(parameters, kept, strict=True))
        self._chunks = _cut(parameters, kept)
        self._present: set[ShardedParameter] = set()
        self._forward = True
        context = parameters[0]._zinf_unit.context
        self._states = ChunkStates(parameters[0]._zinf_unit.placement.nvme, [chunk.spec for chunk in self._chunks])
        context.ledger.add("states", self._states.memory_bytes)
        weakref.finalize(optimizer, _close, self._states, context.ledger).atexit = False  # the kernel frees the files
        _log.info(
            "%s: %s bytes of states on %s, of which %s at a time are in memory; each step reads and writes them once",
            type(optimizer).__name__,
            f"{self._states.drive_bytes:,}",
            ", ".join(self._states.store.folders),
            f"{self._states.memory_bytes:,}",
        )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._kept

    def chunk_steps(self, optimizer: Optimizer) -> Iterator[ChunkStep]:
        """Yield the chunks with gradients, in the opposite order of the last time; each is loaded when it is yielded."""
        self.absorb(optimizer)
        order = range(len(self._chunks)) if self._forward else range(len(self._chunks) - 1, -1, -1)
        self._forward = not self._forward
        due = [n for n in order if any(p.grad is not None for p, _ in self._chunks[n].pieces)]
        for number, following in itertools.zip_longest(due, due[1:]):
            views = self._states.take(number)
            if following is not None:
                self._states.prepare(following)
            yield ChunkStep(self, number, self._chunks[number], views, optimizer)

    def absorb(self, optimizer: Optimizer) -> None:
        """Move states that are in memory, as after `load_state_dict`, to the drives."""
        given = {p: names for p, kept in self._kept.items() if (names := kept.keys() & optimizer.state.get(p, {}).keys())}
        if not given:
            return
        for number, chunk in enumerate(self._chunks):
            if any(p in given for p, _ in chunk.pieces):
                if all(given.get(p) == chunk.spec.states.keys() for p, _ in chunk.pieces):
                    self._states.forget(number)  # nothing of it is needed, and it may be what can't be read
                views = self._states.take(number)
                for parameter, piece in chunk.pieces:
                    for name in given.get(parameter, ()):
                        value = shard_state(optimizer.state[parameter][name], parameter._zinf_unit, name, optimizer)
                        _part(views[name], piece).copy_(value.reshape(-1)[piece.start : piece.end])
                self._states.give_back(number)
        for parameter, names in given.items():
            for name in names:
                del optimizer.state[parameter][name]
        self._present.update(given)

    def bring(self, optimizer: Optimizer) -> None:
        """Put all states into `optimizer.state`; raise `BudgetError` where there is no memory for them."""
        present = [p for p in self._kept if p in self._present]
        needed = sum(p._zinf_unit.shard.numel() * dtype.itemsize for p in present for dtype in self._kept[p].values())
        available = available_memory_bytes()
        if needed > available:
            raise BudgetError(
                f"{type(optimizer).__name__}.state_dict() would take {needed:,} bytes of host memory for the states that live on "
                f"{', '.join(self._states.store.folders)}; {available:,} bytes are available. Save the model alone "
                "(zinf_compile.full_state_dict), or give this process more memory"
            )
        whole = {
            (p, name): torch.empty(p._zinf_unit.shard.numel(), dtype=dtype)
            for p in present
            for name, dtype in self._kept[p].items()
        }
        for number, chunk in enumerate(self._chunks):
            if any(p in self._present for p, _ in chunk.pieces):
                views = self._states.take(number)
                for parameter, piece in chunk.pieces:
                    if parameter in self._present:
                        for name in self._kept[parameter]:
                            whole[parameter, name][piece.start : piece.end].copy_(_part(views[name], piece))
        for (parameter, name), value in whole.items():
            optimizer.state[parameter][name] = kept_state(value, parameter._zinf_unit)

    def drop(self, optimizer: Optimizer) -> None:
        """Take out of `optimizer.state` what `bring` put there."""
        for parameter in self._present:  # not in place: the state dict holds the same mappings
            optimizer.state[parameter] = {k: v for k, v in optimizer.state[parameter].items() if k not in self._kept[parameter]}

    def write(self, number: int) -> None:
        """Start to write a chunk that was changed."""
        self._states.give_back(number)

    def settle(self, parameter: ShardedParameter) -> None:
        """Note that the states of a parameter are complete."""
        self._present.add(parameter)

    def has(self, parameter: ShardedParameter) -> bool:
        """Return whether the parameter has states yet."""
        return parameter in self._present


class ChunkStep:
    """One chunk, loaded: what stands in for its parameters in a step of the optimizer."""

    def __init__(
        self, owner: StreamedStates, number: int, chunk: _Chunk, views: Mapping[str, torch.Tensor], optimizer: Optimizer
    ) -> None:
        self._owner = owner
        self._number = number
        self._views = views
        self.parts: list[tuple[ShardedParameter, torch.Tensor]] = []
        """Each parameter, and the part of its shard that is updated now."""
        self._pieces: list[Piece] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        """What the optimizer's state is for the parts."""
        self.left: dict[ShardedParameter, dict[str, Any]] = {}
        """What the step left that isn't of a parameter's size, as step counts; counts once the whole step is over."""
        for parameter, piece in chunk.pieces:
            grad = local_gradient(parameter)
            if grad is None:
                continue
            part = parameter._zinf_unit.shard[piece.start : piece.end]
            part.grad = grad[piece.start : piece.end]
            self.parts.append((parameter, part))
            self._pieces.append(piece)
            if owner.has(parameter):
                small = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[parameter].items()}
                self.state[part] = small | {name: _part(view, piece) for name, view in views.items()}

    def finish(self, stepped: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Start to write what the step left in the optimizer's state; keep the rest in `left`."""
        for (parameter, part), piece in zip(self.parts, self._pieces, strict=True):
            part.grad = None
            if part not in stepped:
                continue
            self.left[parameter] = {}
            for name, value in stepped[part].items():
                if name in self._views:
                    place = _part(self._views[name], piece)
                    if value.data_ptr() != place.data_ptr():
                        place.copy_(value)
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise UnsupportedOptimizerError(
                        f"state {name!r} for parameter {parameter._zinf_unit.name} appeared after states were laid out on the "
                        f"drive (found there: {', '.join(self._views)}): make a new optimizer after changing its flags"
                    )
                else:
                    self.left[parameter][name] = value
        self._owner.write(self._number)

    def settle(self, optimizer: Optimizer) -> None:
        """The whole step is over: make count what this chunk left behind."""
        for parameter, state in self.left.items():
            optimizer.state[parameter] = state
        for parameter, _ in self.parts:
            self._owner.settle(parameter)
            torch.autograd.graph.increment_version(parameter)


def _cut(parameters: Sequence[ShardedParameter], kept: Sequence[Kept]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    rows = [(p, dict(states), p._zinf_unit.dtype) for p, states in zip(parameters, kept, strict=True)]
    for (states, _), same in itertools.groupby(rows, key=lambda row: (row[1], row[2])):
        members = [p for p, _, _ in same]
        sizes = [p._zinf_unit.shard.numel() for p in members]
        for pieces in cut_chunks(sizes, chunk_numel=CHUNK_NUMEL):
            owned = tuple((members[piece.shard], piece) for piece in pieces)
            first, last = owned[0][0]._zinf_unit.name, owned[-1][0]._zinf_unit.name
            name = f"{first} .. {last} (chunk {len(chunks)})" if first != last else f"{first} (chunk {len(chunks)})"
            chunks.append(_Chunk(ChunkSpec(name, -(-chunk_end(pieces) // ALIGN) * ALIGN, states), owned))
    return chunks


def _part(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    return view[piece.place : piece.place + piece.end - piece.start]


def _close(states: ChunkStates, ledger: Any) -> None:
    ledger.add("states", -states.memory_bytes)
    states.close()


torn: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""Optimizers of which a step ended in the middle of its chunks, and what to say of them."""

_streamed: weakref.WeakKeyDictionary[Optimizer, list[StreamedStates]] = weakref.WeakKeyDictionary()


def streamed_states(optimizer: Optimizer, hollow: Sequence[ShardedParameter]) -> list[StreamedStates]:
    """Return where the states of these parameters live that live on drives; lays out what is new."""
    known = _streamed.get(optimizer, [])
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    fresh: list[ShardedParameter] = []
    kept: list[Kept] = []
    for p in hollow:
        unit = p._zinf_unit
        if unit.placement.optimizer != "nvme" or not unit.shape or not unit.numel or any(p in states for states in known):
            continue
        states = states_kept(optimizer, groups[id(p)], unit.dtype)
        if states:
            fresh.append(p)
            kept.append(states)
    if fresh:
        if optimizer not in _streamed:
            _streamed[optimizer] = known
            optimizer.register_state_dict_pre_hook(_before_state_dict)
            optimizer.register_state_dict_post_hook(_after_state_dict)
            optimizer.register_load_state_dict_post_hook(_after_load)
        known.append(StreamedStates(optimizer, fresh, kept))
    return known


@torch.no_grad()
def _before_state_dict(optimizer: Optimizer) -> None:
    for states in _streamed.get(optimizer, []):
        states.bring(optimizer)


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for states in _streamed.get(optimizer, []):
        states.drop(optimizer)


@torch.no_grad()
def _after_load(optimizer: Optimizer) -> None:
    torn.pop(optimizer, None)
    for states in _streamed.get(optimizer, []):
        states.absorb(optimizer)
