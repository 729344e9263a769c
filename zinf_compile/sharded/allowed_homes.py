"""The tiers on which states may live, from the words and budgets of the options."""

from __future__ import annotations

import dataclasses

from zinf_compile.config import AUTO, Config
from zinf_compile.ir.placements import KINDS
from zinf_compile.ir.tiers import Placement, Tier, Topology


def allowed_homes(config: Config, topology: Topology) -> dict[str, tuple[Tier, ...]]:
    """Return for each kind of states the tiers on which they may live, from near to far: one, or those that `"auto"` means.

    Without a cap and without a drive that is the device alone.
    """
    folders = config.placement().nvme
    capped = config.device_memory is not None or config.host_memory is not None
    tiers = [Tier.DEVICE]
    tiers += [Tier.HOST] if topology.host_apart and (capped or folders) else []
    tiers += [Tier.NVME] if folders else []
    words = {kind: getattr(config, kind) for kind in KINDS}
    words["grads"] = Tier.DEVICE if config.reduce_grads == "step" else words["grads"]  # whole, they are not moved
    return {kind: tuple(tiers) if word == AUTO else (Tier(word),) for kind, word in words.items()}


def saved_tiers(config: Config, topology: Topology) -> tuple[Tier, ...]:
    """Return the tiers that saved values may leave the device for where that is decided, from near to far.

    None where a word says what becomes of them, and without a declared `device_memory`: then nothing counts them.
    """
    if config.activations != AUTO or config.device_memory is None:
        return ()
    drives = (Tier.NVME,) if config.placement().nvme else ()
    return (Tier.HOST, *drives) if topology.host_apart else drives


def may_remake(config: Config) -> bool:
    """Return whether saved values may be dropped and made again where that is decided: within a declared `device_memory`."""
    return config.activations == AUTO and config.device_memory is not None


def farthest_homes(config: Config, topology: Topology) -> Placement:
    """Return the placement of states as far away as is allowed."""
    params, grads, optimizer = (allowed_homes(config, topology)[kind][-1] for kind in KINDS)
    return dataclasses.replace(config.placement(), params=params, grads=grads, optimizer=optimizer)


def is_open(config: Config, topology: Topology) -> bool:
    """Return whether homes are to be decided."""
    return any(len(tiers) > 1 for tiers in allowed_homes(config, topology).values())
