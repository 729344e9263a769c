"""The options of `torch.compile(model, backend="zero_infinity", options={...})`, validated once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zinf_compile.ir.checkpoint_folder import CheckpointFolder
from zinf_compile.ir.compute_shape import BUCKET_BYTES, LEAST_TILE, ComputeShape, default_tile, piece_of
from zinf_compile.ir.file_digest import by_content
from zinf_compile.ir.placements import KINDS
from zinf_compile.ir.reduce_types import parse_dtype
from zinf_compile.ir.saved_memory import RECOMPUTE
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.ir.tiers import Placement, Tier, all_tiers

from .errors import OptionError
from .option_checks import check_known, check_mode, check_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AUTO = "auto"
"""Word for tiers that follow from the budgets."""

SHAPE_PARTS = ("piece_numel", "chunk_bytes", "worth_bytes", "token_tile")
"""Keys of option `compute_shape`."""

PLANNERS = ("just_in_time", "one_ahead", "largest_first", "greedy", "cached_prefetch")
"""Names that option `planner` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the backend. All other decisions follow from the graph."""

    compute: str = "inductor"
    """Execution of the regions between transfers. `"inductor"`: compiled, each distinct region once, within rounding of eager and
    with its random numbers. `"fx"`: operator by operator, with the kernels and bits of eager PyTorch (after a step, those of
    `fused=True` if the optimizer's `fused` is None)."""

    bucket: int | str | None = None
    """Size of a group of transfers: neighbours in order of use are issued together up to this many bytes of full parameters.
    Default: 32 MiB, or a tile where that is less, as under a small `device_memory`."""

    mode: str = "default"
    """Inductor's search for fast kernels, also set by `torch.compile(..., mode=...)`: `"default"`, or
    `"max-autotune-no-cudagraphs"`, which measures kernels while compiling. Modes with CUDA graphs are refused."""

    on_refusal: str = "fx"
    """Handling of a region that Inductor can't compile. `"fx"`: run it operator by operator, with a warning that names the
    operator. `"error"`: raise `CompilationError`, before any parameter is partitioned."""

    chunk_loss: bool | None = None
    """Compute losses over classes (cross-entropy and its parts) and their gradients in chunks of tokens, so that the logits never
    exist as a whole. Default: for logits above 256 MiB in fp32. Several ranks decide that once per head, from the largest logits
    of all ranks, when the first graph with the head is compiled; such graphs are compiled for each number of tokens. A loss that
    can't be chunked is computed whole; the logger `zinf_compile` and `zinf dump` show the reason. Numbers differ from those of
    whole logits by the order in which tokens are summed."""

    compute_shape: Mapping[str, Any] | None = None
    """Parts of the compute shape, which `zinf dump` prints, that aren't options of their own: `"piece_numel"`, the elements of a
    shard that an optimizer updates together and a drive stores together, `"chunk_bytes"`, the bytes of a chunk's logits in fp32,
    `"worth_bytes"`, above which logits are computed in chunks, and `"token_tile"`, a size such as `"64MiB"`: MLPs are computed a
    slice of tokens at a time, forward and backward, so that no value inside takes more. Decides bits."""

    params: str = "auto"
    """Tier of parameters between their uses: `"device"`, `"host"` (the same for a model on the CPU) or `"nvme"` (the drive of
    option `nvme`). `"auto"`: each where there is room, within the caps; without a cap and a drive, the device. The graph
    prefetches them to the device before each use. Numbers are the same for any placement."""

    grads: str = "auto"
    """Tier of reduced gradients until the step, likewise."""

    optimizer: str = "auto"
    """Tier of optimizer states, likewise. A step reads and writes states on a drive in chunks, a few of them in memory at a
    time."""

    activations: str = "auto"
    """Values that a forward saves for its backward: `"keep"`, in the memory of the device; `"host"` (the same for a model on the
    CPU) or `"nvme"` (the drive of option `nvme`), until the backward; `"recompute"`: dropped, and made again in the backward,
    block by block, by the forward's own compute. `"auto"`: kept, but for those that a declared `device_memory` has no room for:
    these move, or are made again. Numbers are the same for any word."""

    reshard_after_forward: bool | str = "auto"
    """Whether full parameters are let go of between a forward and its backward, which then gathers them again. `True`: all of
    them, as ZeRO-3 does; `False`: none, as ZeRO-2, which sends two thirds of the bytes and holds all full parameters at once.
    `"auto"`: those stay gathered for which a declared `device_memory` has room beside everything else; without one, none. One
    process gathers nothing. Numbers are the same for any."""

    reshard_after_backward: bool = True
    """Whether full parameters are let go of behind a backward. `False`: they stay on the device until the step changes them, as
    with FSDP2's `set_reshard_after_backward(False)`. A step so gathers each parameter once, or loads it once from another tier,
    however many micro-batches it has, for forward and backward; the device holds all full parameters at once. Parameters in
    tiles, and rows of embeddings, are gathered for each use all the same. Numbers are the same."""

    reduce_grads: str = "backward"
    """When gradients are averaged over several ranks. `"backward"`: in each, so that a rank holds 1/N of them, as with ZeRO-3 and
    ZeRO-2. `"step"`: once, when they are first read, by clipping or by the step; until then they are added up whole, on the
    device, as with ZeRO-1, and with FSDP2's `set_requires_gradient_sync(False)`. Several backwards in a step so send less, and
    round in another order. Those of parameters in tiles are reduced in each backward all the same."""

    update: str | None = None
    """Place of the optimizer's update: `"host"` or `"device"`. Default: the side of the optimizer's states, which then never move
    between host and device. Both are the same if the device is host memory."""

    master: str | None = None
    """`"float32"`: bf16 and fp16 parameters are updated in fp32, in a copy kept with the optimizer's states. It changes numbers
    (to those that mixed-precision training is known for), hence off by default. Parameters in fp32 have none; a model of nothing
    else gets a warning."""

    reduce_dtype: torch.dtype | str | None = None
    """Data type in which gradients are reduced over ranks, accumulated over micro-batches and kept until the step, as FSDP2's
    option of this name: a `torch.dtype` or its name, such as `"float32"`. `p.grad.dtype` stays the parameter's. Default: fp32 for
    bf16 and fp16 parameters with `master="float32"`, otherwise the parameter's own. A narrower type, such as bf16 for fp32
    parameters, halves the bytes between ranks and loses digits at each sum. Decides bits."""

    nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    """A folder on a drive, or several, over which states are striped; `{local_rank}` in a name is replaced."""

    checkpoint: str | os.PathLike[str] | None = None
    """A folder for checkpoints by `zinf_compile.save`, the same on all ranks. Before the first update of each optimizer a dry run
    of a save takes place, and space is reserved for as many checkpoints as are kept there and one more, so that no save finds
    the drive full. Models and optimizers with the same folder count as one checkpoint."""

    checkpoint_keep: int = 1
    """Checkpoints kept in that folder; the default of `keep` of `zinf_compile.save` there."""

    device_memory: int | str | None = None
    """Cap on device bytes of each rank: shards on this tier, gathered units, gradients in flight, buffers of the step,
    activations, temporaries of compute, and on an accelerator the user's own tensors. Default: the memory that the process may
    use, less a tenth; compute doesn't count then. A cap above that is accepted with a warning."""

    tile: int | str | None = None
    """Largest tile: a parameter of more bytes is cut into row tiles, each gathered, used and released by itself. Default: the
    largest power of two within a quarter of `device_memory`, if that is given and the tile has 1 MiB or more; half of it or less
    where a graph works only so. Decides the last bits of sums over a tiled dimension."""

    host_memory: int | str | None = None
    """Cap on host bytes of all ranks of a node together. If the device is host memory, both caps apply."""

    planner: str | Callable[..., Any] | None = None
    """What decides when parameters' transfers start, and how long they stay: the name of a planner, or a function from a
    `StepProblem` to a `Plan`, the same on all ranks. Default: fixed rules; `cached_prefetch` within a device's cap."""

    machine: str | os.PathLike[str] | None = None
    """The machine by whose rates `"auto"` decides what moves and what is made again: a shipped profile's name, or a file that
    `zinf doctor --profile FILE` wrote, the same on all ranks. Default: rough, of accelerators measured. No bit depends on it."""

    process_group: dist.ProcessGroup | None = None
    """The ranks to partition over; default: all of them."""

    mesh: DeviceMesh | None = None
    """The same as a one-dimensional device mesh; give this or `process_group`."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for the others before it raises `RankMismatchError`: must cover one rank compiling alone. Also
    those without progress after which a drive raises `StoreError`."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None, *, mode: str | None = None, check_folders: bool = True) -> Config:
        """Validate the options or mode given to `torch.compile`; raise `OptionError` for an unknown name or a bad value.

        Without `check_folders`, the folders of `nvme` may be missing: for inspecting a schedule without running it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(options, Mapping | None):
            raise OptionError(f"options={options!r} is a {type(options).__name__}; accepted: a dict of {', '.join(known)}")
        given = dict(options or {})
        if mode is not None:
            given["mode"] = mode
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"unknown option {name!r} for backend 'zero_infinity'; accepted: {', '.join(known)}{hint}")
        config = cls(**given)
        config._validate()
        if check_folders:
            config._check_folders()
        return config

    @property
    def bucket_bytes(self) -> int:
        """`bucket` in bytes, or its default."""
        tile = self.tile_bytes or (BUCKET_BYTES if self.device_memory is None else LEAST_TILE)
        return min(BUCKET_BYTES, tile) if self.bucket is None else parse_bytes(self.bucket, option="bucket")

    @property
    def tile_bytes(self) -> int | None:
        """`tile` in bytes, or its default; None: no tiles."""
        if self.tile is not None:
            return parse_bytes(self.tile, option="tile")
        return default_tile(self.device_bytes or 0)

    @property
    def device_bytes(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else parse_bytes(self.device_memory, option="device_memory")

    @property
    def reduction(self) -> torch.dtype | None:
        """`reduce_dtype` as a type."""
        return parse_dtype(self.reduce_dtype, option="reduce_dtype")

    def for_shards(self, numel: int) -> Config:
        """Return the same with the piece for a rank's shards of `numel` elements in all, where `compute_shape` has none."""
        return self if self.has_piece else self.with_piece(piece_of(numel, self.device_bytes))

    @property
    def has_piece(self) -> bool:
        """Whether `compute_shape` says how large a piece is."""
        return "piece_numel" in (self.compute_shape or {})

    def with_piece(self, piece: int) -> Config:
        """Return the same with another piece; itself, with its signature, where it has that one."""
        shape = {**(self.compute_shape or {}), "piece_numel": piece}
        return self if piece == self.shape().piece_numel else dataclasses.replace(self, compute_shape=shape)

    def shape(self) -> ComputeShape:
        """Return the values that decide bits, beside the model and the types of its states."""
        return ComputeShape(
            bucket_bytes=self.bucket_bytes,
            tile_bytes=self.tile_bytes,
            chunk_loss=self.chunk_loss,
            compute=self.compute,
            mode=self.mode,
            **self._pinned(),
        )

    def signature(self) -> str:
        """Return the options on which all ranks must agree, as text."""
        return (
            f"compute={self.compute} mode={self.mode} bucket={self.bucket_bytes} "
            f"chunk_loss={self.chunk_loss} params={self.params} grads={self.grads} "
            f"optimizer={self.optimizer} update={self.update} master={self.master} reduce_dtype={self.reduction} "
            f"tile={self.tile_bytes} device_memory={self.device_memory} host_memory={self.host_memory} timeout_s={self.timeout_s}"
            + (f" checkpoint={self.checkpoint_folder()}" if self.checkpoint is not None else "")
            + (f" activations={self.activations}" if self.activations != AUTO else "")
            + (f" reshard_after_forward={self.reshard_after_forward}" if self.reshard_after_forward != AUTO else "")
            + ("" if self.reshard_after_backward else " reshard_after_backward=False")
            + (f" reduce_grads={self.reduce_grads}" if self.reduce_grads != "backward" else "")
            + (f" machine={by_content(self.machine)}" if self.machine is not None else "")
            + (f" planner={self.planner_name()}" if self.planner is not None else "")
            + (f" compute_shape={sorted(self._pinned().items())}" if self.compute_shape else "")
        )

    def planner_name(self) -> str:
        """Return the planner's name; a function's is that of the code."""
        given = self.planner
        return given if isinstance(given, str) else str(getattr(given, "__qualname__", type(given).__name__))

    def machine_name(self) -> str | None:
        """Return the name of the machine's profile, or of its file."""
        return None if self.machine is None else os.fspath(self.machine)

    def placement(self) -> Placement:
        """Return the placement of states; on the device where the option says `"auto"`."""
        params, grads, optimizer = (Tier.DEVICE if getattr(self, k) == AUTO else Tier(getattr(self, k)) for k in KINDS)
        return Placement(
            params=params,
            grads=grads,
            optimizer=optimizer,
            nvme=self._folders(),
            update=Tier(self.update) if self.update else None,
            master=torch.float32 if self.master else None,
            reduce_dtype=self.reduction,
            tile=self.tile_bytes,
            piece_numel=self.shape().piece_numel,
            reduce_grads=self.reduce_grads,
            reshard_after_backward=self.reshard_after_backward,
        )

    def saved_values(self) -> Tier:
        """Return the tier of saved values that a word forces; the device's otherwise."""
        return Tier.DEVICE if self.activations in ("keep", AUTO, RECOMPUTE) else Tier(self.activations)

    def checkpoint_folder(self) -> CheckpointFolder | None:
        """Return the folder that was announced for checkpoints."""
        if self.checkpoint is None:
            return None
        return CheckpointFolder(os.path.abspath(os.fspath(self.checkpoint)), self.checkpoint_keep)

    def resolve_group(self) -> dist.ProcessGroup | None:
        """Return the group to partition over; None when torch.distributed is not initialised."""
        if self.mesh is not None:
            return self.mesh.get_group()
        if self.process_group is not None:
            return self.process_group
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def _validate(self) -> None:
        check_known("compute", self.compute, self.compute in ("fx", "inductor"), "'fx', 'inductor'")
        check_mode(self.mode, compute=self.compute)
        self._validate_tiers()
        check_known("on_refusal", self.on_refusal, self.on_refusal in ("fx", "error"), "'fx', 'error'")
        is_choice = self.chunk_loss is None or isinstance(self.chunk_loss, bool)
        check_known("chunk_loss", self.chunk_loss, is_choice, "True, False, or None for logits above 256 MiB")
        is_planner = self.planner is None or callable(self.planner) or self.planner in PLANNERS
        planners = f"{', '.join(map(repr, PLANNERS))}, or a function that takes a StepProblem and returns a Plan"
        check_known("planner", self.planner, is_planner, planners)
        is_choice = self.reshard_after_forward == AUTO or isinstance(self.reshard_after_forward, bool)
        check_known("reshard_after_forward", self.reshard_after_forward, is_choice, "True, False, 'auto'")
        is_bool = isinstance(self.reshard_after_backward, bool)
        check_known("reshard_after_backward", self.reshard_after_backward, is_bool, "True, False")
        check_known("reduce_grads", self.reduce_grads, self.reduce_grads in ("backward", "step"), "'backward', 'step'")
        is_profile = isinstance(self.machine, str | os.PathLike | None)
        check_known("machine", self.machine, is_profile, "a profile's name, or the path of its file")
        self._validate_shape()
        self._validate_checkpoint()
        parse_dtype(self.reduce_dtype, option="reduce_dtype")
        for option in ("bucket", "tile", "device_memory", "host_memory"):
            if getattr(self, option) is not None:
                parse_bytes(getattr(self, option), option=option)
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not math.isfinite(self.timeout_s) or self.timeout_s <= 0:
            raise OptionError(f"option timeout_s={self.timeout_s!r} is not a positive number of seconds")
        check_ranks(self.process_group, self.mesh)

    def _validate_checkpoint(self) -> None:
        given = self.checkpoint
        if given is not None and not (isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str) and str(given)):
            raise OptionError(f"option checkpoint={given!r} is not a path; accepted: a folder, the same one on all ranks")
        if type(self.checkpoint_keep) is not int or self.checkpoint_keep < 1:
            raise OptionError(
                f"option checkpoint_keep={self.checkpoint_keep!r}; accepted: the number of checkpoints to keep, 1 or more"
            )
        if given is None and self.checkpoint_keep != 1:
            raise OptionError(
                f"option checkpoint_keep={self.checkpoint_keep} is given, but no folder: add checkpoint='/path/to/a/folder'"
            )

    def _validate_shape(self) -> None:
        pinned = {} if self.compute_shape is None else self.compute_shape
        if not isinstance(pinned, Mapping) or not pinned.keys() <= set(SHAPE_PARTS):
            raise OptionError(
                f"option compute_shape={pinned!r} is not known; accepted: a dict of {', '.join(SHAPE_PARTS)} (bucket, tile, "
                "chunk_loss, compute and mode are options)"
            )
        for name, value in self._pinned().items():
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise OptionError(f"option compute_shape: {name}={value!r} is not a size; accepted: a positive whole number")

    def _pinned(self) -> dict[str, Any]:
        given = dict(self.compute_shape or {})
        if "token_tile" in given:
            given["token_tile"] = parse_bytes(given["token_tile"], option="compute_shape: token_tile")
        return given

    def _folders(self) -> tuple[str, ...]:
        given = (self.nvme,) if isinstance(self.nvme, str | os.PathLike) else tuple(self.nvme)
        return tuple(os.fspath(path).replace("{local_rank}", os.environ.get("LOCAL_RANK", "0")) for path in given)

    def _validate_tiers(self) -> None:
        for option in KINDS:
            word, words = getattr(self, option), (AUTO, *all_tiers())
            check_known(option, word, word in words, ", ".join(map(repr, words)))
        words = (AUTO, "keep", RECOMPUTE, *filter(Tier.DEVICE.__ne__, all_tiers()))
        check_known("activations", self.activations, self.activations in words, ", ".join(map(repr, words)))
        check_known("update", self.update, self.update in (None, "host", "device"), "'host', 'device'")
        check_known("master", self.master, self.master in (None, "float32"), "'float32'")
        if self.reshard_after_forward is True and not self.reshard_after_backward:
            raise OptionError(
                "option reshard_after_backward=False keeps full parameters on the device until the step, and "
                "reshard_after_forward=True lets go of them behind each forward: omit one of the two"
            )
        if self.reduce_grads == "step" and self.grads not in (AUTO, Tier.DEVICE):
            raise OptionError(
                f"option reduce_grads='step' keeps full gradients on the device, and grads={self.grads!r} asks for another tier: "
                "omit one of the two"
            )
        free = [option for option in KINDS if getattr(self, option) == AUTO]
        on_drives = [option for option in KINDS if option not in free and Tier(getattr(self, option)).in_folders]
        on_drives += ["activations"] if self.saved_values().in_folders else []
        try:
            folders = self._folders()
        except TypeError:
            raise OptionError(f"option nvme={self.nvme!r} is not a path; accepted: a folder, or a list of folders") from None
        if on_drives and not folders:
            raise OptionError(f"option {on_drives[0]}='nvme' needs a drive: add nvme='/path/to/a/folder/on/it'")
        free += ["activations"] if self.activations == AUTO and self.device_memory is not None else []
        if folders and not on_drives and not free:
            raise OptionError(
                f"option nvme={self.nvme!r} is given, but no tier uses it: set params, grads or optimizer to 'nvme' or 'auto', "
                "or activations to 'nvme'"
            )

    def _check_folders(self) -> None:
        for folder in self._folders():
            if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
                raise OptionError(
                    f"option nvme: {folder!r} is no folder that this process may write to; make it, or name another"
                )
