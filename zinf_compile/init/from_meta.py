"""Models that fit nowhere whole: made on the meta device, given their values one module at a time, straight into shards."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zinf_compile._torch import no_torch_function, swap_contents
from zinf_compile.checkpoint.intake import DType, Rename
from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.context import Context, context_for
from zinf_compile.runtime.system.accelerator import numbered
from zinf_compile.runtime.system.host_limits import warn_of_caps
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.allowed_homes import farthest_homes
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.budget_checks import check_shards
from zinf_compile.sharded.eager_gradients import stop_reducing
from zinf_compile.sharded.eligibility import reject_unsupported
from zinf_compile.sharded.homes_ahead import homes_ahead
from zinf_compile.sharded.parameter import ShardedParameter, hollow_out, hollow_tensor
from zinf_compile.sharded.unplanned import plan_later

from .deferred_fills import DeferredFills
from .from_checkpoint import load_values, open_files
from .initializers import (
    explain_untouched,
    in_order,
    initialiser_of,
    initialises_all,
    pretrained_model_of,
    replaced_when_tied,
    steps_of,
)
from .materializer import Materializer
from .materializing import Materialization, MaterializingParameter
from .meta_buffers import MetaBuffers
from .parallel_random import ParallelDraws, is_large, parts_agree
from .value_stores import UnitValues

Initialiser = Callable[[nn.Module], object]


def partition(
    model: nn.Module,
    *,
    init: Initialiser | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: DType | None = None,
    rename: Rename | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Give a model made under `torch.device("meta")` its values, one module at a time, straight into shards; return the model.

        with torch.device("meta"):
            model = MyModel()
        zinf_compile.partition(model, params="nvme", optimizer="nvme", nvme="/mnt/nvme0")
        model.compile(backend="zero_infinity")  # states live where `partition` was told

    `options` are those of the backend. A collective operation: all ranks call it with the same model.

    Values come from `checkpoint`, if given: a safetensors file, an index of several, a folder with either, or what
    `zinf_compile.save`, DeepSpeed (ZeRO-1, 2, 3, universal) or `torch.save` have written; each rank reads its own ranges. `dtype`
    and `rename` say in which types and under which names, as for `zinf_compile.load`.

    Otherwise they come from the modules' own initialisers in the order in which building the model runs them: what
    `reset_parameters` gives, and for models of transformers their `initialize_weights`. These are the numbers of the model built
    whole on the CPU, in these types, from the same random state of PyTorch, rank 0's, on any number of ranks; that state is
    afterwards what building it leaves. Of tied weights those count that the constructor assigns to the others. Then `init`, if
    given, is called with each module, children first, as by `model.apply(init)`: it may read and change tensors as if they were
    whole.

    Parameters stay the same objects, tied ones tied; buffers become whole ones on `device`. Raises `UnsupportedModelError`, or
    `CheckpointError`, naming everything that has no value or doesn't fit, and leaves the model on meta as it was.
    """
    config = Config.from_options(options)
    if not (init is None or callable(init)):
        raise TypeError(f"init={init!r} can't be called; accepted: a function of one module")
    if init is not None and checkpoint is not None:
        raise UnsupportedModelError("partition() was given init and checkpoint: values come from one of them; omit one")
    if checkpoint is None and (dtype is not None or rename is not None):
        raise UnsupportedModelError("partition() was given dtype or rename, which are for a checkpoint: give one, too")
    model, device = plain(model), numbered(torch.device(device))
    targets = collect(model, device)
    steps = list(steps_before(model, init, loads=checkpoint is not None))
    context = context_for(config.resolve_group(), device, timeout_s=config.timeout_s, signature=config.signature())
    warn_of_caps(config, device)
    install()
    far = farthest_homes(config, context.link.topology)
    once = not far.params.in_memory and init is None and checkpoint is None
    with contextlib.ExitStack() as undo, torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        undo.enter_context(random_numbers_of_rank_0(context))
        files = open_files(model, checkpoint, context, dtype=dtype, rename=rename) if checkpoint is not None else None
        if files is not None:
            undo.callback(files.close)
            undo.enter_context(torch.random.fork_rng(devices=[]))  # what is drawn meanwhile is overwritten
        made = undo.enter_context(initialized(model, targets, steps, config, context, once=once))
        if files is not None:
            load_values(model, files, made.parameters, made.units, made.materializer)
            made.materializer.finish()
        untouched = [t.name for t, p in zip(targets, made.parameters, strict=True) if not p._zinf_materialization.filled]
        missing = untouched + made.buffers.untouched()
        lines = [f"{p._zinf_materialization.name} {p._zinf_materialization.checksum}" for p in made.parameters]
        context.ranks.agree([*missing, *lines], what="comparing the ranks' models, which every rank makes alike")
        if missing:
            raise explain_untouched(model, missing)
        made.partition(device)
        made.keep()
        context.memory.gather_memory.clear()  # see `sharded.partition`
    return model


@dataclasses.dataclass(frozen=True)
class Initialized:
    """A model that was on meta, in the middle of being partitioned."""

    targets: Sequence[Expected]
    parameters: list[MaterializingParameter]
    units: list[Unit]
    buffers: MetaBuffers
    materializer: Materializer

    def partition(self, device: torch.device) -> None:
        """Make the parameters partitioned ones, and move buffers to `device`."""
        self.buffers.move(device)
        for target, parameter, unit in zip(self.targets, self.parameters, self.units, strict=True):
            become_sharded(parameter, unit)
            target.tie()

    def keep(self) -> None:
        """Let parameters and buffers be what they are now."""
        self.buffers.keep()
        for target in self.targets:
            target.done = True


@contextlib.contextmanager
def initialized(
    model: nn.Module,
    targets: Sequence[Expected],
    steps: Sequence[tuple[nn.Module, Callable[[], object]]],
    config: Config,
    context: Context,
    *,
    once: bool,
) -> Iterator[Initialized]:
    """Make units for a model on meta and run its initialisers; unless the result is kept inside, it is on meta again afterwards.

    `once`: what is drawn isn't drawn again or replaced.
    """
    stand_ins = [target.stand_in for target in targets]
    slots = [target.slot for target in targets]
    config = config.for_shards(sum(slot.numel for slot in slots) // context.ranks.shard_group.size)
    homes = homes_ahead(config, slots, context)
    with contextlib.ExitStack() as undo:
        with context.ranks.fail_together("reserving room for the model"):
            check_shards(config, slots, context, homes)
            units = make_units([(s, t.name) for s, t in zip(stand_ins, targets, strict=True)], context, homes)
        room = _largest_module_bytes(targets)
        deferred = _deferred(model, targets, context, room, once=once)
        materializer = Materializer(context.memory.host_ledger, compare=context.size > 1, room=room, deferred=deferred)
        undo.callback(materializer.drop)
        buffers = undo.enter_context(MetaBuffers(model))
        parameters = undo.enter_context(_materializing(targets, units, materializer))
        with ParallelDraws():
            for module, step in steps:
                step()
                _take_replaced(module, targets)
        materializer.finish()
        yield Initialized(targets, parameters, units, buffers, materializer)


@dataclasses.dataclass
class Expected:
    """A parameter on the meta device, and what takes its place."""

    name: str
    meta: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    """Several, where weights are tied; the first is the one whose own it is."""
    slot: ParameterSlot
    stand_in: torch.Tensor
    """Has the metadata it will have."""
    done: bool = False
    by_owner: dict[tuple[int, str], nn.Parameter] = dataclasses.field(default_factory=dict)

    def tie(self) -> None:
        """Give all its modules the same parameter."""
        for module, attribute in self.owners:
            module._parameters[attribute] = self.meta


def collect(model: nn.Module, device: torch.device) -> list[Expected]:
    """Describe the parameters; raise `UnsupportedModelError` for one that isn't on meta or can't be partitioned."""
    found: dict[int, Expected] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if parameter is None:
                continue
            _reject(parameter, name)
            if id(parameter) not in found:
                slot = ParameterSlot.of(parameter, name, device=device)
                reject_unsupported(parameter, slot, with_values=False)
                stand_in = hollow_tensor(parameter.detach(), device=device).requires_grad_(parameter.requires_grad)
                found[id(parameter)] = Expected(name, parameter, [], slot, stand_in)
            found[id(parameter)].owners.append((module, attribute))
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                raise UnsupportedModelError(
                    f"attribute {attribute} of module {prefix or '(the model)'} is a tensor on the meta device, not a parameter "
                    'or buffer: nothing will give it a value. Make it a buffer (register_buffer), or make it with device="cpu"'
                )
    if not found:
        raise UnsupportedModelError("the model has no parameters: there is nothing to partition")
    replaced, names = replaced_when_tied(model), {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    for expected in found.values():
        expected.owners.sort(key=lambda owner: (names[id(owner[0])], owner[1]) in replaced)
    return list(found.values())


def _largest_module_bytes(targets: Sequence[Expected]) -> int:
    """Return the bytes of the parameters of the module that has the most."""
    sizes: collections.Counter[int] = collections.Counter()
    for target in targets:
        sizes.update({id(module): target.stand_in.nbytes for module, _ in target.owners})
    return max(sizes.values())


def _deferred(model: nn.Module, targets: Sequence[Expected], context: Context, room: int, *, once: bool) -> DeferredFills | None:
    """Return what notes how values are drawn; None where that must not differ between ranks, or is not worth it.

    `once`: what was drawn goes to a drive, and isn't drawn again or replaced, as are values of models of transformers.
    """
    dtypes = {t.stand_in.dtype for t in targets if is_large(t.stand_in.numel(), t.stand_in.dtype)}
    if not dtypes:
        return None
    what = "comparing the ranks' ways to draw random numbers"
    if not all(context.ranks.agree([what], what=what, value=float(all(map(parts_agree, dtypes))))):
        return None
    at_once = once and not any(map(initialises_all, model.modules()))
    return DeferredFills(context.memory.host_ledger, most_bytes=room, at_once=at_once)


def reject_lazy(parameter: nn.Parameter, name: str) -> None:
    """Raise `UnsupportedModelError` for a parameter without a shape."""
    if nn.parameter.is_lazy(parameter):
        raise UnsupportedModelError(f"parameter {name} of a lazy module has no shape yet: give the module its sizes")


def _reject(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, ShardedParameter):
        raise UnsupportedModelError(
            f"parameter {name} is partitioned already: partition() is called once, with the whole model; "
            "zinf_compile.load_full_state_dict loads other values"
        )
    reject_lazy(parameter, name)
    if parameter.device.type != "meta":
        raise UnsupportedModelError(
            f"parameter {name} is on {parameter.device}; partition() takes a model that is on the meta device as a whole: build "
            'it inside `with torch.device("meta"):`, or, to keep values made on the CPU, inside '
            "`with zinf_compile.partitioned(...):`. A model that fits into memory needs neither: its first compiled call "
            "partitions it"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UnsupportedModelError(f"parameter {name} has hooks, which would be lost: register them after partition()")


def steps_before(model: nn.Module, init: Initialiser | None, *, loads: bool) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """Yield what is to be run to initialise the model, or before a checkpoint is loaded what its files don't hold."""
    if not loads:
        yield from steps_of(model, strict=init is None)
    for module, name in in_order(model):
        if init is not None:
            yield module, lambda module=module: init(module)  # type: ignore[misc]
        recomputed = any(
            buffer is not None and buffer.device.type == "meta" and key in module._non_persistent_buffers_set
            for key, buffer in module._buffers.items()
        )
        if loads and recomputed:
            own, pretrained = initialiser_of(module), pretrained_model_of(model, name)
            if own is not None:
                yield module, own
            if pretrained is not None:
                yield module, lambda module=module, pretrained=pretrained: pretrained._init_weights(module)  # type: ignore[misc]


@contextlib.contextmanager
def _materializing(
    targets: Sequence[Expected], units: Sequence[Unit], materializer: Materializer
) -> Iterator[list[MaterializingParameter]]:
    """Make the parameters materializing ones in place; at the end, restore those not partitioned, and ties."""
    made: list[MaterializingParameter] = []
    twins: list[nn.Parameter] = []
    try:
        for target, unit in zip(targets, units, strict=True):
            twin = nn.Parameter(hollow_tensor(target.meta.detach(), device=torch.device("cpu")), target.meta.requires_grad)
            swap_contents(target.meta, twin)
            twins.append(twin)
            first, *others = target.owners
            own = Materialization(target.name, id(first[0]), UnitValues(unit), materializer)
            made.append(begin_materializing(target.meta, own))
            target.by_owner[id(first[0]), first[1]] = target.meta
            for module, attribute in others:  # built whole, each had a weight of its own until it was replaced by the first one
                decoy = nn.Parameter(hollow_tensor(twin.detach(), device=torch.device("cpu")), twin.requires_grad)
                replaced = Materialization(target.name, id(module), None, materializer)
                module._parameters[attribute] = begin_materializing(decoy, replaced)
                target.by_owner[id(module), attribute] = decoy
        yield made
    finally:
        materializer.drop()
        for target, twin in itertools.zip_longest(targets, twins):
            if twin is not None and not target.done:
                target.meta.__class__ = nn.Parameter
                stop_reducing(target.meta)
                for attribute in ("_zinf_materialization", "_zinf_unit"):
                    vars(target.meta).pop(attribute, None)
                swap_contents(target.meta, twin)
            target.tie()


def begin_materializing(parameter: nn.Parameter, materialization: Materialization) -> MaterializingParameter:
    """Make a hollow parameter a materializing one, in place."""
    parameter._zinf_materialization = materialization  # type: ignore[attr-defined]
    parameter.__class__ = MaterializingParameter
    assert isinstance(parameter, MaterializingParameter)
    return parameter


def become_sharded(materialized: MaterializingParameter, unit: Unit) -> None:
    """Make a parameter whose value its unit has a partitioned one."""
    parameter: nn.Parameter = materialized
    del materialized._zinf_materialization
    parameter.__class__ = nn.Parameter
    unit.parameter = weakref.ref(parameter)
    plan_later([unit])
    with no_torch_function():
        hollow_out(parameter, unit)
    if unit.backing is None:
        unit.context.memory.ledger.track("params", unit.shard)


def _take_replaced(root: nn.Module, targets: Sequence[Expected]) -> None:
    """Where an initialiser put a new parameter in a materializing one's place, take its value."""
    for module, attribute, found in [(m, name, p) for m in root.modules() for name, p in m._parameters.items()]:
        if isinstance(found, MaterializingParameter) or found is None:
            continue
        expected = next((t.by_owner[id(module), attribute] for t in targets if (id(module), attribute) in t.by_owner), None)
        if not isinstance(expected, MaterializingParameter):
            raise UnsupportedModelError(
                f"the initialiser of a {type(module).__name__} registered a parameter {attribute}, which the model on meta hasn't"
            )
        expected._zinf_materialization.materializer.adopt(expected, found.detach())
        module._parameters[attribute] = expected


@contextlib.contextmanager
def random_numbers_of_rank_0(context: Context) -> Iterator[None]:
    """Let all ranks draw what rank 0 draws; put its own random state back on a rank where that failed."""
    before = torch.get_rng_state()
    share_random_state(context)
    try:
        yield
    except BaseException:
        torch.set_rng_state(before)
        raise


def share_random_state(context: Context) -> None:
    """Give all ranks rank 0's."""
    states = context.ranks.exchange(torch.get_rng_state().double(), what="rank 0's random state")
    torch.set_rng_state(states[0].to(torch.uint8))


__all__ = [
    "Initialized",
    "become_sharded",
    "begin_materializing",
    "collect",
    "initialized",
    "partition",
    "random_numbers_of_rank_0",
    "reject_lazy",
    "share_random_state",
    "steps_before",
]
