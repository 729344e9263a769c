"""Models that code builds on the CPU in its own way, partitioned while it builds them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from zinf_compile._torch import no_torch_function
from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.context import Context, context_for
from zinf_compile.runtime.system.accelerator import numbered
from zinf_compile.runtime.system.host_limits import warn_of_caps
from zinf_compile.runtime.system.malloc import return_free_memory
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.allowed_homes import farthest_homes
from zinf_compile.sharded.budget_checks import check_shards
from zinf_compile.sharded.eligibility import reject_unsupported
from zinf_compile.sharded.homes_ahead import homes_ahead
from zinf_compile.sharded.parameter import ShardedParameter, hollow_tensor

from .from_meta import become_sharded, begin_materializing, reject_lazy, share_random_state
from .materializer import Materializer
from .materializing import Materialization, MaterializingParameter
from .spill_file import SpilledValues, SpillFile
from .value_stores import HostValues, UnitValues, keep

_active: list[_Building] = []
_UNTRIMMED_BYTES = 16 << 20


def is_building() -> bool:
    """Return whether a `partitioned()` block is open."""
    return bool(_active)


@contextlib.contextmanager
def partitioned(*, device: torch.device | str = "cpu", **options: Any) -> Iterator[None]:
    """Partition every model that is built inside the `with` block, one module at a time.

        with zinf_compile.partitioned(params="nvme", optimizer="nvme", nvme="/mnt/nvme0"):
            model = MyModel()
        model.compile(backend="zero_infinity")

    `options` are those of the backend. All ranks build the same models, from rank 0's random numbers; where one comes out with
    other values, all raise `RankMismatchError`. The code in the block may do with parameters what it likes (initialise, tie, copy
    or convert them): each is loaded when it is needed, and saved when one of another module is. So the numbers are those of
    the model built whole.

    What was built is partitioned when the block ends; an error inside leaves its models unusable. A drive holds them twice for
    that moment: sizes aren't known before. Models on meta are for `partition`.
    """
    if _active:
        raise UnsupportedModelError("partitioned() inside partitioned(): one block is enough for several models")
    config, on_device = Config.from_options(options), numbered(torch.device(device))
    group, signature = config.resolve_group(), config.signature()
    context = context_for(group, on_device, timeout_s=config.timeout_s, signature=signature)
    host = context_for(group, torch.device("cpu"), timeout_s=config.timeout_s, signature=signature)
    warn_of_caps(config, on_device)
    install()
    with contextlib.ExitStack() as undo:
        building = _Building(config, host)
        undo.callback(building.close)
        _active.append(building)
        undo.callback(_active.pop)
        undo.callback(register_module_parameter_registration_hook(building.on_parameter).remove)
        undo.callback(register_module_module_registration_hook(building.on_module).remove)
        share_random_state(host)
        yield
        with torch.inference_mode(False), torch.no_grad():
            building.finish(context, on_device)


class _Building:
    """The parameters built inside one `partitioned` block."""

    def __init__(self, config: Config, host: Context) -> None:
        self._config, self._host = config, host
        far = farthest_homes(config, host.link.topology)
        folders = far.nvme if far.params.in_folders else ()
        self._spill_file = SpillFile(folders[0]) if folders else None
        self._materializer = Materializer(host.memory.host_ledger, compare=host.size > 1)
        self._materializer.enlist = self._enlist
        self._parameters: dict[int, weakref.ref[MaterializingParameter]] = {}
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._freed = 0
        """Bytes of parameters that the allocator has had back since it was last told to return free memory to the system."""

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Let the materializer have a parameter that a module registers."""
        self._modules[id(module)] = weakref.ref(module)
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":  # one on meta may be replaced yet
            self._enlist(parameter, f"{type(module).__name__}.{name}", id(module))

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Note both modules as built in this block."""
        for each in (module, child):
            if each is not None:
                self._modules[id(each)] = weakref.ref(each)

    def finish(self, context: Context, device: torch.device) -> None:
        """Partition what was built, model by model."""
        models = self._models()
        for _, named in models:
            for name, parameter in named:
                _reject(parameter, name)
                if type(parameter) is nn.Parameter:  # registered in a way that no hook sees
                    self._enlist(parameter, name, id(parameter))
        self._materializer.enlist = None
        self._materializer.finish()
        return_free_memory()
        placed: set[int] = set()
        with_units: list[tuple[MaterializingParameter, Unit]] = []
        compared: list[str] = []
        for _, named in [*models, (None, self._copied())]:
            fresh = [(name, p) for name, p in named if isinstance(p, MaterializingParameter) and id(p) not in placed]
            placed.update(id(p) for _, p in fresh)
            compared += [f"{name} {list(p.shape)} {p.dtype} {p._zinf_materialization.checksum}" for name, p in fresh]
            with context.ranks.fail_together("partitioning what was built"):
                with_units += self._keep(fresh, context, device)
        context.ranks.agree(compared, what="comparing the ranks' models, which every rank builds alike")
        for parameter, unit in with_units:
            become_sharded(parameter, unit)
        context.memory.gather_memory.clear()  # see `sharded.partition`
        for root, _ in models:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)

    def close(self) -> None:
        """Let go of what isn't partitioned by now."""
        self._materializer.drop()
        if self._spill_file is not None:
            self._spill_file.close()

    def _enlist(self, parameter: nn.Parameter, name: str, owner: int) -> None:
        reject_unsupported(parameter, ParameterSlot.of(parameter, name))
        if parameter.device.type != "cpu":
            raise UnsupportedModelError(
                f"parameter {name} was made on {parameter.device}: inside partitioned() models are built on the CPU, and "
                f"partitioned(device={str(parameter.device)!r}) says where they are to be used"
            )
        place = HostValues(self._host, name) if self._spill_file is None else SpilledValues(self._spill_file, self._host, name)
        with torch.inference_mode(False), torch.no_grad(), no_torch_function():
            value = parameter.detach()
            parameter.data = hollow_tensor(value)
            made = begin_materializing(parameter, Materialization(name, owner, place, self._materializer, settled=False))
        self._materializer.adopt(made, value)
        self._parameters[id(made)] = weakref.ref(made)
        self._freed += value.nbytes
        if self._freed > _UNTRIMMED_BYTES:
            del value
            self._freed = 0
            return_free_memory()

    def _models(self) -> list[tuple[nn.Module, list[tuple[str, nn.Parameter]]]]:
        """Return the outermost modules that were built, in the order in which they were begun, and their parameters by name."""
        modules = [module for reference in self._modules.values() if (module := reference()) is not None]
        inner = {id(child) for module in modules for child in module.children()}
        return [(module, list(module.named_parameters())) for module in modules if id(module) not in inner]

    def _copied(self) -> list[tuple[str, nn.Parameter]]:
        """Return parameters of modules that were copied as a whole, under the names of what they are copies of."""
        alive = [parameter for reference in self._parameters.values() if (parameter := reference()) is not None]
        return [(parameter._zinf_materialization.name, parameter) for parameter in alive]

    def _keep(
        self, named: list[tuple[str, MaterializingParameter]], context: Context, device: torch.device
    ) -> list[tuple[MaterializingParameter, Unit]]:
        """Move values to units of their own."""
        if not named:
            return []
        slots = [ParameterSlot.of(p, name, device=device) for name, p in named]
        config = self._config.for_shards(sum(slot.numel for slot in slots) // context.ranks.shard_group.size)
        homes = homes_ahead(config, slots, context)
        check_shards(config, slots, context, homes)
        stand_ins = [(hollow_tensor(p, device=device).requires_grad_(p.requires_grad), name) for name, p in named]
        units = make_units(stand_ins, context, homes)
        for unit in units:
            unit.checkpoint = self._config.checkpoint_folder()
        for (_, parameter), unit in zip(named, units, strict=True):
            place = parameter._zinf_materialization.place
            assert isinstance(place, HostValues | SpilledValues), "built in this block"
            if unit.tiles and unit.shard_group.size > 1:  # its shard isn't one range of the whole
                whole = torch.empty(unit.numel, dtype=unit.dtype)
                place.load(whole)
                UnitValues(unit).save(whole).wait()
            else:
                hand_over = functools.partial(place.hand_over, on_device=unit.backing is None)
                keep(unit, hand_over).wait()
        return [(parameter, unit) for (_, parameter), unit in zip(named, units, strict=True)]


def _reject(parameter: nn.Parameter, name: str) -> None:
    reject_lazy(parameter, name)
    if parameter.device.type == "meta":
        raise UnsupportedModelError(
            f"parameter {name} is on the meta device and got no value inside partitioned(): build the model on the CPU there, or "
            "give one on meta to zinf_compile.partition(model, ...)"
        )
    if not isinstance(parameter, MaterializingParameter | ShardedParameter) and type(parameter) is not nn.Parameter:
        reject_unsupported(parameter, ParameterSlot.of(parameter, name))
