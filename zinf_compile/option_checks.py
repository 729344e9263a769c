"""Checks of options, each for itself; those of several together are `Config`'s."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .errors import OptionError

MODES = ("default", "max-autotune-no-cudagraphs")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_known(option: str, value: object, is_known: bool, accepted: str) -> None:
    """Refuse a value that is not known."""
    if not is_known:
        raise OptionError(f"option {option}={value!r} is not known; accepted: {accepted}")


def check_mode(mode: str, *, compute: str) -> None:
    """Refuse what Inductor's modes can't be."""
    accepted = "accepted: " + ", ".join(map(repr, MODES))
    if mode in _WITH_CUDA_GRAPHS:
        raise OptionError(
            f"mode={mode!r} asks for CUDA graphs, which replay fixed addresses, while parameters are gathered into "
            f"buffers that move from call to call; {accepted}"
        )
    if mode not in MODES:
        raise OptionError(f"mode={mode!r} is not known to backend 'zero_infinity'; {accepted}")
    if mode != "default" and compute != "inductor":
        raise OptionError(
            f"mode={mode!r} chooses among Inductor's kernels, and compute={compute!r} uses none of them; omit the "
            "mode or set compute='inductor'"
        )


def check_ranks(process_group: Any, mesh: Any) -> None:
    """Refuse what is no set of ranks."""
    if process_group is not None and mesh is not None:
        raise OptionError("options process_group and mesh exclude each other: give one of them")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise OptionError(
            "option process_group is a group that this rank is no member of; give it to the models of the group's members only"
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise OptionError(
            f"option process_group is a {type(process_group).__name__}; accepted: what torch.distributed.new_group "
            "returns on a member of the group"
        )
    if mesh is not None:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  (costs an import only when used)

        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            found = f"{mesh.ndim}-dimensional" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise OptionError(f"option mesh is {found}; accepted: a one-dimensional DeviceMesh (slice it by name first)")
