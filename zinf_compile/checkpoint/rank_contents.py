"""What one rank saves of a model and its optimizers: the tensors that it has parts of, and their values piece by piece.

Called by `save`; knows no files. Tensors have the names that `torch.distributed.checkpoint` gives those of
`{"model": model.state_dict(), "optimizer": ...}`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError, UnsupportedModelError
from zinf_compile.ir.chunk_columns import VALUE
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import BLOCK_BYTES
from zinf_compile.optim.chunk_transfers import ChunkTransfers
from zinf_compile.optim.state_pieces import DrivePiece, MemoryState, OwnStates, own_states, pieces_on_drive, states_in_memory
from zinf_compile.optim.step_saves import Groups
from zinf_compile.optim.watched_states import StatesWatch
from zinf_compile.runtime.units.shard_values import ParameterShard, pieces_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

from .companions import companion_pieces
from .gathered import state_names
from .plain_values import encode, readable
from .rectangles import Rectangle
from .safetensors_header import DTYPES
from .saved_pieces import Place, SavedPiece, memory_pieces, unit_pieces
from .saved_steps import SavedStep, step_to_save
from .saved_tiles import describe_tiles
from .shard_parts import ShardPart, shard_parts, stretches_of

_SMALL_BYTES, _COPIED_BYTES = 1 << 20, 16 << 20
"""Whole tensors of so many bytes at most, and so many of all of them, are copied; others are written before `save` returns."""

Values = Iterator[tuple[str, int, torch.Tensor]]
"""Key of a tensor, number of the first element in this rank's shard, elements, flat in host memory; valid until the next."""


@dataclasses.dataclass
class SavedTensor:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[ShardPart]
    """What this rank saves of it, in the order of its shard."""


class RankContents:
    """Tensors by key, the settings beside them as JSON, and the values of this rank's parts."""

    def __init__(self, rank: int, size: int) -> None:
        self.tensors: dict[str, SavedTensor] = {}
        self.settings: dict[str, Any] = {}
        self._rank, self._size = rank, size
        self._whole: dict[str, torch.Tensor] = {}
        self._sources: list[Callable[[], Values]] = []
        self.pieces: list[SavedPiece] = []
        """What may be written later, and is therefore not among `values`."""
        self.watched: dict[Unit | ChunkTransfers | StatesWatch, None] = {}
        """Owners of such pieces, which tell the save in `saving` before they change."""
        self._parts: dict[int, list[ShardPart]] = {}
        """Of parameters, by id, which their states share."""
        self.steps: dict[Optimizer, SavedStep] = {}
        """Deferred steps that are under way, whose values are taken from them."""
        self.can_wait = False
        """Whether anything may be written later; equal on all ranks."""

    def take_steps(self, optimizers: Iterable[Optimizer]) -> None:
        """Have the model and these optimizers saved as they will be once deferred steps are over; called before they are added.

        Raises `StepFailedError` where one has failed.
        """
        for optimizer in optimizers:
            step = step_to_save(optimizer)
            if step is not None:
                self.steps[optimizer] = step

    def add_model(self, model: nn.Module) -> dict[int, str]:
        """Add parameters and persistent buffers, tied ones once; return the first name of each by identity."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        units: dict[str, Unit] = {}
        for name, tensor in state_names(plain(model)).items():
            if id(tensor) in first:
                aliases[name] = first[id(tensor)]
                continue
            first[id(tensor)] = name
            if isinstance(tensor, ShardedParameter):
                self._add_parameter(f"model.{name}", tensor)
                units[name] = tensor._zinf_unit
            elif isinstance(tensor, ShardedTensor):
                key = f"model.{name}"
                self.add_shard(key, tensor.unit, tensor, tensor.dtype, partial(companion_pieces, key, tensor))
            else:
                self.add_whole(f"model.{name}", tensor)
        self.settings["aliases"] = aliases
        if tiles := describe_tiles(units):
            self.settings["tiles"] = tiles
        return first

    def add_optimizer(self, prefix: str, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Add an optimizer's settings and states; `names`: of the model's parameters."""
        step = self.steps.get(optimizer)
        found = own_states(optimizer, () if step is None else step.updating)
        tensors = self.describe_optimizer(prefix, optimizer, names, found)
        if step is not None:
            for key in tensors:
                self._whole.pop(key, None)
            step.describe = partial(self._describe_later, prefix, names, found, tensors)
        for held in states_in_memory(optimizer, found):
            self._add_memory_state(f"{prefix}.state.{names[id(held.parameter)]}.{held.name}", held)
        for piece in pieces_on_drive(optimizer):
            self._add_drive_piece(piece, lambda parameter, state: f"{prefix}.state.{names[id(parameter)]}.{state}")

    def describe_optimizer(
        self, prefix: str, optimizer: Optimizer, names: dict[int, str], found: Mapping[torch.Tensor, OwnStates]
    ) -> dict[str, torch.Tensor]:
        """Add settings and states without the values of large ones; return the tensors among the others. `found`: the states."""
        for number, group in enumerate(optimizer.param_groups):
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise CheckpointError(
                    f"{prefix} ({type(optimizer).__name__}) has {len(unknown)} parameters in group {number} that the model has "
                    "not; accepted: an optimizer of the model that is saved"
                )
        small = {parameter: own.small for parameter, own in found.items()}
        tensors: dict[str, torch.Tensor] = {}
        described = _described(prefix, optimizer.param_groups, small, names, tensors)
        self.settings.setdefault("optimizers", {})[prefix] = {"class": type(optimizer).__name__, **described}
        for name, tensor in tensors.items():
            self.add_whole(name, tensor, rank=0)  # states of a number are among them: rank 0 has its element
        for parameter, own in found.items():
            for state, dtype in own.large.items():
                key = f"{prefix}.state.{names[id(parameter)]}.{state}"
                if own.unit is None:
                    self._add(key, parameter, dtype, self._whole_parts(parameter.shape))
                else:
                    self._add(key, parameter, dtype, self._parts_of(own.unit, parameter))
        return tensors

    def _describe_later(
        self,
        prefix: str,
        names: dict[int, str],
        found: Mapping[torch.Tensor, OwnStates],
        before: Mapping[str, torch.Tensor],
        groups: Groups,
        small: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> list[SavedPiece]:
        """Replace an optimizer's settings and small states by those after its step; return the pieces of the tensors among them.

        Raises `CheckpointError` where these are others than `before` it, whose places in the files are fixed.
        """
        tensors: dict[str, torch.Tensor] = {}
        small = {parameter: small.get(parameter, own.small) for parameter, own in found.items()}
        self.settings["optimizers"][prefix].update(_described(prefix, groups, small, names, tensors))
        kinds, expected = ({k: (t.shape, t.dtype) for k, t in each.items()} for each in (tensors, before))
        if kinds != expected:
            differing = sorted(key for key in kinds.keys() | expected.keys() if kinds.get(key) != expected.get(key))
            raise CheckpointError(
                f"a step has changed the shape or type of {differing[0]}, or whether it is there; call "
                "zinf_compile.synchronize() between optimizer.step() and zinf_compile.save()"
            )
        return [
            piece
            for key, tensor in tensors.items()
            if self.tensors[key].parts
            for piece in memory_pieces(key, key, VALUE, _copied(tensor))
        ]

    def add_whole(self, key: str, tensor: torch.Tensor, *, rank: int | None = None) -> None:
        """Add a tensor that is whole on every rank: one of them saves it, `rank` or one after the other."""
        parts = self._whole_parts(tensor.shape, rank)
        self._add(key, tensor, tensor.dtype, parts)
        if parts:
            self._whole[key] = tensor

    def add_plain(self, key: str, value: Any) -> None:
        """Add a plain value, tensors in it included."""
        self.settings[key] = self._plain(key, value)

    def values(self) -> Values:
        """Yield the values of this rank's parts but those of `pieces`."""
        for source in self._sources:
            yield from source()
        for key, tensor in self._whole.items():
            yield from _in_pieces(key, tensor.detach().reshape(-1))

    @property
    def has_values(self) -> bool:
        """Whether `values` may yield any."""
        return bool(self._sources or self._whole)

    def copy_small(self) -> None:
        """Copy small whole tensors, so that they may be written later, where anything may."""
        room = _COPIED_BYTES if self.can_wait else 0
        for key, tensor in list(self._whole.items()):
            size = format_of(tensor.dtype).bytes(tensor.numel())
            if size <= min(room, _SMALL_BYTES):
                room -= size
                self.pieces += memory_pieces(key, key, VALUE, _copied(self._whole.pop(key)))

    def release(self) -> None:
        """Let go of all values: gradients, say, may be dropped by whoever has them."""
        self._whole, self._sources, self.pieces, self.watched, self.steps, self._parts = {}, [], [], {}, {}, {}

    def _plain(self, key: str, value: Any) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        encoded = encode(value, key, tensors)
        for name, tensor in tensors.items():
            self.add_whole(name, tensor, rank=0)  # states of a number are among them: rank 0 has its element
        return encoded

    def _add_parameter(self, key: str, parameter: ShardedParameter) -> None:
        unit = parameter._zinf_unit

        def values() -> Values:
            shard = ParameterShard(unit)
            for start, end in pieces_of(unit):
                yield key, start, shard.fetch(start, end)()

        self.can_wait = True
        if not any(step.updates(unit) for step in self.steps.values()):
            unit.wait_updated()
        unit.check_whole()
        if unit.aliased:  # who has another tensor of this memory changes it without a word
            self.add_shard(key, unit, parameter, unit.dtype, values)
            return
        self._add(key, parameter, unit.dtype, self._parts_of(unit, parameter))
        self.pieces += unit_pieces(unit, key)
        self.watched[unit] = None

    def _add_memory_state(self, key: str, state: MemoryState) -> None:
        if state.watch is None:
            self._sources.append(lambda: _in_pieces(key, state.read()))
        else:
            self.pieces += memory_pieces(state.watch, key, state.name, state.read())
            self.watched[state.watch] = None

    def _add_drive_piece(self, piece: DrivePiece, key_of: Callable[[torch.Tensor, str], str]) -> None:
        places = [Place(key_of(p, piece.name), start, offset, numel) for p, start, offset, numel in piece.parts]
        owner = piece.transfers.owner(piece.chunk)
        self.pieces.append(SavedPiece(owner, piece.name, piece.start, piece.end, piece.dtype, places, read=piece.read))
        self.watched[piece.transfers] = None

    def add_shard(self, key: str, unit: Unit, parameter: torch.Tensor, dtype: torch.dtype, values: Callable[[], Values]) -> None:
        """Add a tensor that is partitioned like a parameter, whose pieces `values` yields in order."""
        self._add(key, parameter, dtype, self._parts_of(unit, parameter))
        self._sources.append(values)

    def _add(self, key: str, tensor: torch.Tensor, dtype: torch.dtype, parts: Iterable[ShardPart]) -> None:
        if key in self.tensors:
            raise CheckpointError(f"two tensors would be saved as {key}; accepted: names that differ")
        if key != readable(key):
            raise CheckpointError(f"{readable(key)} has a name with a surrogate, which UTF-8 can't hold; accepted: other names")
        if dtype not in DTYPES.values():
            kind = UnsupportedModelError if key.startswith("model.") else CheckpointError
            raise kind(f"{key} is {dtype}, which safetensors files don't hold; accepted: {list(DTYPES.values())}")
        self.tensors[key] = SavedTensor(tuple(tensor.shape), dtype, list(parts))

    def _parts_of(self, unit: Unit, parameter: torch.Tensor) -> list[ShardPart]:
        found = self._parts.get(id(parameter))
        if found is None:
            found = self._parts[id(parameter)] = _parts_of(unit, parameter)
        return found

    def _whole_parts(self, shape: Sequence[int], rank: int | None = None) -> list[ShardPart]:
        if self._rank != (len(self.tensors) % self._size if rank is None else rank):
            return []
        return [ShardPart(Rectangle((0,) * len(shape), tuple(shape)), 0, None)]


def _described(
    prefix: str,
    groups: Sequence[Mapping[str, Any]],
    small: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Return groups and small states of an optimizer as JSON can hold them; tensors among them are added to `tensors`."""
    found = []
    for number, group in enumerate(groups):
        rest = {name: value for name, value in group.items() if name != "params"}
        settings = encode(rest, f"{prefix}.group.{number}", tensors)
        found.append({"params": [names[id(p)] for p in group["params"]], "settings": settings})
    states = {names[id(p)]: encode(dict(values), f"{prefix}.state.{names[id(p)]}", tensors) for p, values in small.items()}
    return {"groups": found, "states": states}


def _in_pieces(key: str, flat: torch.Tensor) -> Values:
    step = format_of(flat.dtype).numel_within(BLOCK_BYTES)
    for start in range(0, flat.numel(), step):
        yield key, start, _in_plain_memory(flat[start : start + step].cpu())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor, flat in host memory."""
    return _in_plain_memory(tensor.detach().reshape(-1).to("cpu", copy=True))


def _in_plain_memory(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor whose memory has its elements one after the other, also of one that is expanded or conjugated."""
    return flat.resolve_conj().resolve_neg().contiguous()


def _parts_of(unit: Unit, parameter: torch.Tensor) -> list[ShardPart]:
    numel = math.prod(parameter.shape)
    rank = unit.shard_group.rank
    if not numel:
        return [ShardPart(Rectangle((0,) * len(parameter.shape), tuple(parameter.shape)), 0, None)] if rank == 0 else []
    stride = parameter.stride() if isinstance(parameter, ShardedTensor) else unit.stride
    return shard_parts(parameter.shape, stride, stretches_of(unit.spans, rank, numel))
