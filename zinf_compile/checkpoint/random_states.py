"""Random generators of each rank in a checkpoint: PyTorch's on the host and on the accelerator, Python's, and numpy's global one.

numpy's is there where any rank has imported `numpy.random`. The same number of ranks gets them back. Another keeps those of the
ranks that exist, and seeds the rest from (seed, rank). Called by `save` and `load`.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import random
import struct
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.comm.ranks import Ranks

from .notices import notify
from .rank_contents import RankContents

if TYPE_CHECKING:
    from .checkpoint_files import CheckpointFiles

_log = logging.getLogger("zinf_compile")

_NUMPY_KEY = 624
_NUMPY_NUMEL = _NUMPY_KEY + 4


def uses_numpy(ranks: Ranks | None) -> bool:
    """Return whether any rank has imported `numpy.random`, and may have drawn from it. A collective operation."""
    here = float("numpy.random" in sys.modules)
    if ranks is None:
        return bool(here)
    return bool(ranks.exchange(torch.tensor([here], dtype=torch.float64), what="random generators").any())


def add_random_states(contents: RankContents, size: int, devices: Collection[str], *, numpy: bool) -> None:
    """Add the generators of this rank, and the seed of rank 0 for ranks that there will be more of.

    `devices`: types of those that the model is on, the same on all ranks; an accelerator that is none of them is left alone.
    `numpy`: what `uses_numpy` has returned.
    """
    kinds = {"cpu": torch.get_rng_state(), "python": _python_state()}
    if numpy:
        kinds["numpy"] = _numpy_state()
    accelerator = _accelerator()
    if accelerator is not None and accelerator in devices:
        kinds[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    for number in range(size):
        for kind, state in kinds.items():  # of equal shape on all ranks, but for the values
            contents.add_whole(f"random.{number}.{kind}", state, rank=number)
    contents.settings["random"] = {"seed": torch.initial_seed(), "ranks": size, "kinds": list(kinds)}


def check_random_states(files: CheckpointFiles, ranks: Ranks | None) -> None:
    """Raise `CheckpointError` for generators that no save has written, or whose bytes are damaged; see `load_random_states`."""
    settings = files.settings.get("random")
    if settings is None:
        return
    if not _is_complete(settings, files):
        raise CheckpointError(
            f"{files.folder} says of random generators {str(settings)[:80]!r}, which no save has written: was it edited?"
        )
    keys = _keys(settings, ranks)
    for kind, key in keys.items():
        state = files.whole(key)
        try:
            if kind == "cpu":
                torch.Generator().set_state(state)
            elif kind == "python":
                random.Random().setstate(_python_state_of(state))
            elif kind == "numpy":
                _check_numpy_state(state)
        except (TypeError, ValueError, RuntimeError, OverflowError, struct.error) as error:
            raise CheckpointError(f"{files.folder}: {key} is the state of no random generator known here: {error}") from error


def load_random_states(files: CheckpointFiles, ranks: Ranks | None) -> None:
    """Restore the generators of this rank or, where the checkpoint has none of it, seed them; a checkpoint without any: nothing.

    `ranks`: those that share the model; None where it is whole, as before the first compiled call.
    """
    settings = files.settings.get("random")
    if settings is None:
        return
    rank = number_of_this_rank(ranks)
    size = number_of_ranks(ranks)
    if rank == 0 and size != settings["ranks"]:
        notify(_line(files, settings, size))
    if rank >= settings["ranks"]:
        seed = seed_of(settings["seed"], rank)
        _log.info(
            "rank %d: the checkpoint is of %d ranks; random generators are seeded with %d, from the seed %d and the rank",
            rank, settings["ranks"], seed, settings["seed"],
        )  # fmt: skip
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in settings["kinds"] and (numbers := _numpy_random()) is not None:
            numbers.seed(seed % (1 << 32))
        return
    for kind, key in _keys(settings, ranks).items():
        if kind == "cpu":
            torch.set_rng_state(files.whole(key))
        elif kind == "python":
            random.setstate(_python_state_of(files.whole(key)))
        elif kind == "numpy":
            _set_numpy_state(files.whole(key))
        elif kind == _accelerator():
            torch.get_device_module(kind).set_rng_state(files.whole(key))
        else:
            _log.info("rank %d: the random generator of %s in the checkpoint is left out: there is none here", rank, kind)


def _is_complete(settings: Any, files: CheckpointFiles) -> bool:
    """Return whether all generators of all ranks that saved are there."""
    seed, size, kinds = (settings.get(name) if isinstance(settings, dict) else None for name in ("seed", "ranks", "kinds"))
    if type(seed) is not int or type(size) is not int or size < 1 or not isinstance(kinds, list):
        return False
    keys = [f"random.{rank}.{kind}" for rank in range(min(size, len(files.tensors))) for kind in kinds]
    return all(isinstance(kind, str) for kind in kinds) and all(key in files.tensors for key in keys)


def _keys(settings: dict[str, Any], ranks: Ranks | None) -> dict[str, str]:
    """Return the keys of this rank's generators by kind; none where the checkpoint has none of it."""
    rank = number_of_this_rank(ranks)
    return {kind: f"random.{rank}.{kind}" for kind in settings["kinds"]} if rank < settings["ranks"] else {}


def number_of_this_rank(ranks: Ranks | None) -> int:
    """Return the number among those that share the model or, before it is partitioned, among all."""
    if ranks is not None:
        return ranks.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def number_of_ranks(ranks: Ranks | None) -> int:
    """Return how many share the model or, before it is partitioned, how many there are."""
    if ranks is not None:
        return ranks.size
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _line(files: CheckpointFiles, settings: dict[str, Any], size: int) -> str:
    """Say what becomes of the generators where another number of ranks loads them than has saved them."""
    saved = settings["ranks"]
    rest = f"those of {_ranks(size, saved)} are left out"
    if size > saved:
        rest = f"those of {_ranks(saved, size)} are seeded from the seed {settings['seed']} and the rank"
    return (
        f"{files.folder} is of {saved} rank{'s' if saved > 1 else ''}, loaded on {size}: random generators of "
        f"{_ranks(0, min(saved, size))} are as they were saved, {rest}"
    )


def _ranks(start: int, end: int) -> str:
    return f"rank {start}" if end - start == 1 else f"ranks {start} to {end - 1}"


def seed_of(seed: int, rank: int) -> int:
    """Return the seed of a rank that a checkpoint has no generators of."""
    digest = hashlib.sha256(f"{seed} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _accelerator() -> str | None:
    """Return the type of the accelerator, if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _python_state() -> torch.Tensor:
    """Return Python's generator: its version, its numbers, and whether a second normal number is at hand, with its bits."""
    version, numbers, gauss = random.getstate()
    bits = struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]
    return torch.tensor([version, *numbers, gauss is not None, bits], dtype=torch.int64)


def _python_state_of(state: torch.Tensor) -> tuple[Any, ...]:
    version, *numbers, there, bits = state.tolist()
    return version, tuple(numbers), struct.unpack("<d", struct.pack("<q", bits))[0] if there else None


def _numpy_random() -> Any:
    """Return `numpy.random`, which is imported where it wasn't; None where there is none."""
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


def _mersenne_twister(becoming: str) -> Any:
    """Return the state of numpy's global generator; None where there is none, or, with a line in the log, another."""
    found = None if (numbers := _numpy_random()) is None else numbers.get_state(legacy=False)
    if found is None or found["bit_generator"] == "MT19937":
        return found
    _log.info("numpy's global generator is a %s and not %s; accepted: MT19937", found["bit_generator"], becoming)
    return None


def _numpy_state() -> torch.Tensor:
    """Return numpy's global generator: whether it is there, its numbers, place, and the second normal number with its bits."""
    found = _mersenne_twister("saved")
    if found is None:
        return torch.zeros(_NUMPY_NUMEL, dtype=torch.int64)
    bits = struct.unpack("<q", struct.pack("<d", found["gauss"]))[0]
    key = found["state"]["key"].tolist()
    return torch.tensor([1, *key, found["state"]["pos"], found["has_gauss"], bits], dtype=torch.int64)


def _check_numpy_state(state: torch.Tensor) -> None:
    there, *key, place, normal, _ = state.tolist()
    sound = len(key) == _NUMPY_KEY and all(0 <= number < 1 << 32 for number in key)
    if not (sound and {there, normal} <= {0, 1} and 0 <= place <= _NUMPY_KEY):
        raise ValueError("not the numbers of an MT19937")


def _set_numpy_state(state: torch.Tensor) -> None:
    there, *key, place, normal, bits = state.tolist()
    if there and _mersenne_twister("restored") is not None:
        gauss = struct.unpack("<d", struct.pack("<q", bits))[0]
        _numpy_random().set_state(("MT19937", key, place, normal, gauss))
