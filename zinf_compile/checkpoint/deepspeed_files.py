"""Checkpoints of DeepSpeed's ZeRO-1, 2 and 3, read without DeepSpeed: where in the ranks' files each parameter is.

Note: how the files are laid out
    ZeRO-1 and 2: each group's parameters lie one after the other in a flat tensor, which is cut into as many partitions as
    there are ranks. `param_slice_mappings` of a rank says which elements of its partition are of which parameter; those of
    the ranks, in order, are the parameter. ZeRO-3: each parameter is cut into as many equal parts as there are ranks, the
    last one padded; a rank's parts lie one after the other, in the order of the groups, in flat tensors of its own
    (`fp32_flat_groups`). Moments lie like the values in fp32.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zinf_compile.errors import CheckpointError

from .foreign import ForeignCheckpoint, ForeignOptimizer, ForeignTensor, Span, plain, whole_of
from .regular_file import read_text
from .torch_archive import ArchivedTensor

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STRUCTURE = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "checkpoint_parallel_dimensions",
})  # fmt: skip


def find_tag(folder: Path, latest: str = LATEST) -> Path | None:
    """Return the folder of the newest checkpoint that DeepSpeed says is in `folder`; None where it says nothing."""
    if not (folder / latest).is_file():
        return None
    tag = read_text(folder / latest, 4096).strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
        raise CheckpointError(f"{folder / latest} names {tag[:80]!r}; accepted: the name of a folder beside it")
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{folder / latest} names {tag!r}, which is no folder beside it: fetch it, too")
    return folder / tag


def is_deepspeed(folder: Path) -> bool:
    """Say whether a folder has files of a checkpoint of DeepSpeed."""
    return any(_MODEL.fullmatch(path.name) or _OPTIMIZER.fullmatch(path.name) for path in folder.iterdir())


def open_deepspeed(folder: Path, *, values_beside: bool = False) -> ForeignCheckpoint:
    """Open the files of one checkpoint; `values_beside`: parameters are somewhere else.

    Raises `CheckpointError` where a file is missing, damaged or of a model in parallel parts.
    """
    models, optimizers = _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER)
    if not models:
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt and no zero_pp_rank_0_mp_rank_00_model_states.pt")
    found = ForeignCheckpoint(folder, {})
    try:
        states = [_dict(found.open(path), path) for path in models]
        wrapped = [_dict(_dict(found.open(path), path).get("optimizer_state_dict"), path) for path in optimizers]
        stage = 3 if models[0].name.startswith("zero_pp_rank") else _stage(wrapped)
        if stage == 3 and not optimizers and not values_beside:
            raise CheckpointError(f"{folder} has no files *_optim_states.pt, in which the parameters of ZeRO-3 are: fetch them")
        _read(found, states, wrapped, stage)
        found.check()
    except BaseException:
        found.close()
        raise
    return found


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = {}
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            if int(match[2]):
                raise CheckpointError(
                    f"{folder} has {path.name}: the model was in parallel parts. Convert it to a universal checkpoint, by "
                    "DeepSpeed's ds_to_universal.py, and load that"
                )
            found[int(match[1] or 0)] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        raise CheckpointError(f"{folder} lacks the files of ranks {missing}, like {found[max(found)].name}")
    return [found[rank] for rank in sorted(found)]


def _read(found: ForeignCheckpoint, models: list[dict[str, Any]], ranks: list[dict[str, Any]], stage: int) -> None:
    first = models[0]
    found.aliases = {k: v for k, v in (first.get("shared_params") or {}).items() if isinstance(k, str) and isinstance(v, str)}
    found.extra = plain({key: value for key, value in first.items() if key not in _STRUCTURE})
    shapes = found.groups = [_shapes(group, found.path) for group in first.get("param_shapes") or []]
    buffers = set(first.get("buffer_names") or [])
    for name, tensor in _dict(first.get("module") or {}, found.path).items():
        if isinstance(tensor, ArchivedTensor) and (stage < 3 or name in buffers) and name not in found.aliases:
            found.tensors[name] = whole_of(tensor)
    for name, shape in _shapes(first.get("frozen_param_shapes") or {}, found.path).items():
        fragments = [_tensors([(each.get("frozen_param_fragments") or {}).get(name)]) for each in models]
        if stage == 3:
            found.tensors[name] = _of_parts(shape, fragments, 0)
    if not ranks:
        return
    counts = {value for rank in ranks for value in _numbers(rank.get("partition_count"))}
    if counts and max(counts) != len(ranks):
        raise CheckpointError(
            f"{found.path} has the files *_optim_states.pt of {len(ranks)} ranks, {max(counts)} have written it"
        )
    lay_out = _of_stage_3 if stage == 3 else _of_stages_1_and_2
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    found.masters = lay_out(found, shapes, ranks, [_tensors(rank.get(flat)) for rank in ranks])
    base = [states_of(rank) for rank in ranks]
    states: dict[str, dict[str, ForeignTensor]] = {name: {} for name in found.masters}
    for state in sorted({s for own in base[0].values() for s, value in own.items() if _is_large(value)}):
        flats = [[own[group].get(state) for group in sorted(own)] for own in base]
        if all(_is_large(value) for rank_flats in flats for value in rank_flats):
            for name, tensor in lay_out(found, shapes, ranks, flats).items():  # type: ignore[arg-type]
                states[name][state] = tensor
    settings, steps = settings_of(ranks[0]), steps_of(base[0], settings_of(ranks[0]))
    number = {name: group for group, inside in enumerate(shapes) for name in inside}
    small = {name: {"step": steps[min(number[name], len(steps) - 1)]} if steps else {} for name in found.masters}
    found.optimizers = [ForeignOptimizer(states, small, settings, [list(group) for group in shapes])]


def _of_stages_1_and_2(
    found: ForeignCheckpoint, shapes: Sequence[Mapping[str, Sequence[int]]], ranks: Sequence[dict[str, Any]],
    flats: Sequence[Sequence[ArchivedTensor]],
) -> dict[str, ForeignTensor]:  # fmt: skip
    """Return each parameter from the elements that each rank's mapping says."""
    made = {}
    for number, group in enumerate(shapes):
        for name, shape in group.items():
            spans = []
            for rank, own in zip(ranks, flats, strict=True):
                mappings = rank.get("param_slice_mappings")
                if not isinstance(mappings, list) or len(mappings) <= number or len(own) <= number:
                    raise CheckpointError(
                        f"{found.path} says of some rank not where its parameters are (param_slice_mappings): it was written by "
                        "a DeepSpeed before 0.7. Load it with DeepSpeed and save it again"
                    )
                address = mappings[number].get(name)
                if address is not None:
                    start, numel = (getattr(address, "attribute", lambda _: None)(key) for key in ("start", "numel"))
                    if type(start) is not int or type(numel) is not int:
                        raise CheckpointError(f"{found.path} is damaged: where {name} is, is {str(address)[:80]}")
                    spans.append(Span(own[number], start, numel))
            made[name] = ForeignTensor(shape, spans)
    return made


def _of_stage_3(
    found: ForeignCheckpoint, shapes: Sequence[Mapping[str, Sequence[int]]], ranks: Sequence[dict[str, Any]],
    flats: Sequence[Sequence[ArchivedTensor]],
) -> dict[str, ForeignTensor]:  # fmt: skip
    """Return each parameter from the ranks' equal parts."""
    made, offset = {}, 0
    for name, shape in itertools.chain.from_iterable(group.items() for group in shapes):
        made[name] = _of_parts(shape, flats, offset)
        offset += -(-math.prod(shape) // len(ranks))
    return made


def _of_parts(shape: Sequence[int], flats: Sequence[Sequence[ArchivedTensor]], offset: int) -> ForeignTensor:
    """Return a parameter of which each rank has an equal part, padded, from `offset` on of its tensors put together."""
    numel = math.prod(shape)
    part, left = -(-numel // len(flats)), numel
    spans: list[Span] = []
    for own in flats:
        spans += _cut(own, offset, min(part, left))
        left -= min(part, left)
    return ForeignTensor(shape, spans)


def _cut(flats: Sequence[ArchivedTensor], offset: int, numel: int) -> Iterator[Span]:
    begin = 0
    for flat in flats:
        end = begin + flat.numel()
        low, high = max(offset, begin), min(offset + numel, end)
        if low < high:
            yield Span(flat, low - begin, high - low)
        begin = end


def _stage(ranks: Sequence[dict[str, Any]]) -> int:
    """Return 3 for ZeRO-3, 1 for what is laid out like ZeRO-1 and 2, as by `bf16_optimizer`, 0 for no partitions."""
    return 0 if not ranks else 3 if "fp32_flat_groups" in ranks[0] else 1


def states_of(rank: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the states of the optimizer that DeepSpeed wraps, by the number of the flat tensor."""
    base = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
    if isinstance(base, dict):
        base = base.get("state")
    rows = base.items() if isinstance(base, dict) else enumerate(base) if isinstance(base, list) else []
    return {number: own for number, own in rows if type(number) is int and isinstance(own, dict)}


def settings_of(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of that optimizer, by group."""
    base = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return [plain({k: v for k, v in group.items() if k != "params"}) for group in groups or [] if isinstance(group, dict)]


def steps_of(base: Mapping[int, dict[str, Any]], settings: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the steps taken, by group; DeepSpeed's own optimizers keep them among the settings."""
    found = [plain(own["step"]) for _, own in sorted(base.items()) if "step" in own]
    return found or [group["step"] for group in settings if "step" in group]


def _is_large(value: Any) -> bool:
    return isinstance(value, ArchivedTensor) and len(value.shape) == 1


def _tensors(value: Any) -> list[ArchivedTensor]:
    return [each for each in value if isinstance(each, ArchivedTensor)] if isinstance(value, list | tuple) else []


def _numbers(value: Any) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def _shapes(value: Any, path: Path) -> dict[str, tuple[int, ...]]:
    rows = _dict(value, path)
    if not all(isinstance(name, str) and isinstance(shape, tuple) for name, shape in rows.items()):
        raise CheckpointError(f"{path} is damaged: its shapes of parameters are {str(value)[:80]}")
    if not all(type(size) is int and size >= 0 for shape in rows.values() for size in shape):
        raise CheckpointError(f"{path} is damaged: its shapes of parameters are {str(value)[:80]}")
    return rows


def _dict(value: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged, or not DeepSpeed's: it has a {type(value).__name__} where a dict is expected")
    return value
