"""The value of a parameter off the device, on one process: a tensor that loads it when it is read.

`state_dict()`, `parameter.detach()` and `parameter.data` give one. It aliases the parameter, as in eager PyTorch: what is read is
the value after the last step, and what is written in place is written to the parameter's tier.

Note: how it is read. Operators, `numpy()` and pickling load the value and free it when they are done. A pointer is valid as
long as any tensor of the parameter's value exists, so `data_ptr()` pins it until then: in memory where the caps leave room, else
in a file on the parameter's drive. Views are lazy too.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from zinf_compile._torch import no_override, rebuild_tensor, tree_map, typed_storage
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.units.fetch import blank, fetch
from zinf_compile.runtime.units.shard_layout import is_dense
from zinf_compile.runtime.units.unit import Unit

from .offloaded_storage import OffloadedStorage, storage_of

_STORAGE_DTYPES = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Those that pickled tensors name by the class of their storage."""

_OVERWRITING = frozenset(["aten::copy_", "aten::fill_", "aten::zero_"])


class _View:
    """What an `OffloadedValue` shows. Who copies a tensor with its attributes, as `async_save` does, gets none of it."""

    def __init__(self, storage: OffloadedStorage, geometry: torch.Tensor) -> None:
        """`geometry`: the same view of memory that is not there."""
        self.storage, self.geometry = storage, geometry

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        return None


class OffloadedValue(torch.Tensor):
    """A parameter's value, or a view of it; see above. Raises `BudgetError` where one value doesn't fit within the caps."""

    _zinf_view: _View

    @staticmethod
    def __new__(cls, storage: OffloadedStorage, geometry: torch.Tensor) -> OffloadedValue:
        settings: dict[str, Any] = {
            "dtype": geometry.dtype,
            "device": storage.unit.device,
            "storage_offset": geometry.storage_offset(),
        }
        with torch.inference_mode(False):  # a parameter's value is none of inference mode's, wherever it is looked at
            return torch.Tensor._make_wrapper_subclass(cls, geometry.shape, strides=geometry.stride(), **settings)

    def __init__(self, storage: OffloadedStorage, geometry: torch.Tensor) -> None:
        self._zinf_view = _View(storage, geometry)

    @property
    def _storage(self) -> OffloadedStorage:
        return self._zinf_view.storage

    @property
    def _geometry(self) -> torch.Tensor:
        return self._zinf_view.geometry

    def data_ptr(self) -> int:
        """Return where the value is in memory, for reading, as long as a tensor of the parameter's value exists."""
        return self._on(self._storage.pin()).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, whose size and identity cost nothing."""
        return self._storage

    def _typed_storage(self) -> Any:
        return typed_storage(self._storage, self.dtype)

    storage = _typed_storage

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as an array, which is read-only: what is written there would not be kept."""
        value = self.detach() if force else self
        if value.requires_grad:
            torch.empty(0, requires_grad=True).numpy()  # raises
        array = self._on(self._storage.host_value()).numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the value as numbers."""
        return self._on(self._storage.host_value()).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._on(self._storage.value()).requires_grad_(self.requires_grad))

    def __format__(self, spec: str) -> str:
        return format(self._on(self._storage.value()).requires_grad_(self.requires_grad), spec)

    def __iter__(self) -> Iterator[Any]:
        rows = super().__iter__()
        self._storage.pin()  # each row would load the whole
        return rows

    def __copy__(self) -> torch.Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        key = ("zinf value of", id(self._storage.unit))
        if key not in memo:
            memo[key] = self._storage.value().clone()
        copied = self._on(memo[key]).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.dtype != self._storage.unit.dtype or self.dtype not in _STORAGE_DTYPES:
            return self.clone().__reduce_ex__(protocol)
        saved = typed_storage(self._storage.for_saving(), self.dtype)
        layout = (self.storage_offset(), tuple(self.shape), self.stride())
        return rebuild_tensor, (saved, *layout, self.requires_grad, collections.OrderedDict())

    def share_memory_(self) -> NoReturn:
        self._refuse("moved to shared memory")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        self._refuse("handed over by DLPack, through which it could be written to")

    def as_subclass(self, cls: type[Any]) -> NoReturn:
        """See `torch.Tensor.as_subclass`; raises."""
        self._refuse(f"seen as a {cls.__name__}")

    def is_all_of(self, unit: Unit) -> bool:
        """Say whether this is the whole value of a unit, in its order: what was written to it is there."""
        same = (tuple(self.shape), self.stride(), self.dtype) == (unit.shape, unit.stride, unit.dtype)
        return self._storage.unit is unit and same and not self.storage_offset()

    def _refuse(self, what: str) -> NoReturn:
        raise PartitionedParameterError(
            f"the value of parameter {self._storage.unit.name} is off the device and can't be {what}: use a clone() of it"
        )

    def _on(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what this is a view of in `flat`, which holds the parameter's value."""
        geometry = self._geometry
        with torch.no_grad():
            typed = flat if flat.dtype == geometry.dtype else flat.view(geometry.dtype)
            return typed.as_strided(geometry.shape, geometry.stride(), geometry.storage_offset())

    __torch_function__ = no_override  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            viewed = _view(func, args, kwargs)
            if viewed is not None:
                return viewed
        written = _written(func, args, kwargs)
        if written and torch.Tag.inplace_view in func.tags:
            written[0]._refuse(f"given another shape or memory by {func._schema.name.split('::')[-1]}()")
        return _run(func, args, kwargs, written)


def value_of(unit: Unit) -> OffloadedValue:
    """Return the value of a unit off the device, on the only rank."""
    with torch.inference_mode(False), torch.no_grad():
        geometry = unit.logical(torch.empty(unit.numel, dtype=unit.dtype, device="meta"))
    return OffloadedValue(storage_of(unit), geometry)


@torch.compiler.disable
def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return lazy views, None where the operator makes copies."""
    base = args[0] if args else None
    if not isinstance(base, OffloadedValue):
        return None
    if torch.is_inference_mode_enabled():  # operators made of others come as they are
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    with torch.inference_mode(False), torch.no_grad():
        made = func(base._geometry, *args[1:], **kwargs)
    each = made if isinstance(made, list | tuple) else [made]
    base_storage = base._geometry.untyped_storage()._cdata
    if not all(isinstance(view, torch.Tensor) and view.untyped_storage()._cdata == base_storage for view in each):
        return None
    return tree_map(lambda view: OffloadedValue(base._storage, view), made)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[OffloadedValue]:
    """Return the values that the operator writes to."""
    found: list[OffloadedValue] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [v for v in (given if isinstance(given, list | tuple) else [given]) if isinstance(v, OffloadedValue)]
    return found


@torch.compiler.disable  # nothing here is to be captured
def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[OffloadedValue]) -> Any:
    """Run the operator on loaded values, and write back the ones that it changes."""
    fresh = {id(value._storage.unit) for value in written}
    flats: dict[int, tuple[OffloadedStorage, torch.Tensor]] = {}
    lazy: dict[int, OffloadedValue] = {}
    to_host = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
    overwritten = args[0]._storage.unit if _overwrites(func, args) else None

    def load(item: Any) -> Any:
        if not isinstance(item, OffloadedValue):
            return item
        storage = item._storage
        key = id(storage.unit)
        if key not in flats:
            flats[key] = storage, _loaded(storage, anew=key in fresh, to_host=to_host, blank_=storage.unit is overwritten)
        real = item._on(flats[key][1])
        lazy[id(real)] = item
        return real

    given = tree_map(load, tuple(args)), tree_map(load, kwargs)
    result = func(*given[0], **given[1])
    for key in fresh:
        storage, flat = flats[key]
        storage.keep(flat)
    return tree_map(lambda item: lazy.get(id(item), item), result) if written else result


def _loaded(storage: OffloadedStorage, *, anew: bool, to_host: bool, blank_: bool) -> torch.Tensor:
    if blank_:
        return blank(storage.unit)
    if anew:
        return fetch(storage.unit)
    return storage.host_value() if to_host else storage.value()


def _overwrites(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether every element of a parameter is written and none of it read."""
    target = args[0] if args else None
    if func._schema.name not in _OVERWRITING or not isinstance(target, OffloadedValue):  # type: ignore[attr-defined]
        return False
    others = [item for item in args[1:] if isinstance(item, OffloadedValue)]
    unit = target._storage.unit
    return (
        target.dtype == unit.dtype
        and target.numel() == unit.numel
        and is_dense(target.shape, target.stride())
        and all(item._storage.unit is not unit for item in others)
    )
