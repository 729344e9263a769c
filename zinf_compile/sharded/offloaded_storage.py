"""The storage of values that are off the device: its size is known, its bytes are loaded when they are read."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NoReturn

import torch

from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.units.fetch import PinnedValue, fetch, fetch_to_host
from zinf_compile.runtime.units.unit import Unit

_lock = threading.RLock()
_storages: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
"""By the identity of the unit, which the storage keeps."""


class OffloadedStorage(torch.UntypedStorage):
    """One for each unit while somebody has a value of it, tied parameters included: as in eager PyTorch, its identity and its
    address say which tensors share memory.

    `data_ptr` loads the bytes to an address that stays theirs until the storage is freed. They are read-only: what is written
    there is not kept.
    """

    unit: Unit
    _pinned: PinnedValue | None
    _for_saving: SavedStorage | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return such a storage for `storage_of` alone; who asks the class for memory of some size gets memory."""
        if cls is OffloadedStorage and (args, kwargs) != _NO_MEMORY:
            return _with_class_of_copies(torch.UntypedStorage(*args, **kwargs))
        return super().__new__(cls, *args, **kwargs)

    @classmethod
    def _new_shared(cls, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        return _with_class_of_copies(torch.UntypedStorage._new_shared(size, device=device))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The parameter's."""
        return self.unit.device

    def nbytes(self) -> int:
        """Return the bytes of the value."""
        return self.unit.bytes

    size = nbytes

    def __len__(self) -> int:
        return self.unit.bytes

    def data_ptr(self) -> int:
        """Load the bytes and return their address. Of a GPU's memory, which only kernels read: an identity, until it is there."""
        if self.unit.device.type != "cpu" and self._pinned is None:
            return int(self._cdata)
        return self.pin().data_ptr()

    def pin(self) -> torch.Tensor:
        """Load the value to an address that it keeps until this storage is freed, and return it, flat."""
        with _lock:
            if self._pinned is None:
                self._pinned = PinnedValue(self.unit)
            return self._pinned.current()

    def value(self) -> torch.Tensor:
        """Return the value as it is now, flat, on the device; to be read and dropped."""
        return fetch(self.unit) if self._pinned is None else self.pin()

    def host_value(self) -> torch.Tensor:
        """Return the same in host memory."""
        return fetch_to_host(self.unit) if self._pinned is None or self.unit.device.type != "cpu" else self.pin()

    def keep(self, value: torch.Tensor) -> None:
        """Save this value in the unit, on the unit's tier."""
        self.unit.save(value)
        parameter = self.unit.parameter()
        if parameter is not None:
            torch.autograd.graph.increment_version(parameter)
        with _lock:
            if self._pinned is not None:
                self._pinned.changed(value)

    def for_saving(self) -> SavedStorage:
        """Return what `torch.save` is given."""
        if self._for_saving is None:
            saved = SavedStorage(0, device="meta")
            saved.unit = self.unit
            self._for_saving = saved
        return self._for_saving

    def cpu(self) -> torch.UntypedStorage:
        """Return the bytes in host memory of their own."""
        return self.host_value().untyped_storage().clone()

    def clone(self) -> torch.UntypedStorage:
        """Return a copy on the device."""
        return self.value().clone().untyped_storage()

    def tolist(self) -> list[int]:
        """Return the bytes."""
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return self.cpu()[index]

    def __iter__(self) -> Any:
        return iter(self.cpu())

    def __reduce__(self) -> Any:
        return _by_value(self)

    def __copy__(self) -> torch.UntypedStorage:
        return self.clone()

    def __deepcopy__(self, memo: Any) -> torch.UntypedStorage:
        return self.clone()

    def is_shared(self) -> bool:
        """No other process has it."""
        return False

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PartitionedParameterError(
            f"the value of parameter {self.unit.name} is off the device: its storage can be read, not changed or shared; "
            "change the tensor in place (mul_, copy_, ...), or work on a clone() of it"
        )

    __setitem__ = copy_ = fill_ = resize_ = share_memory_ = byteswap = pin_memory = _refuse
    _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = _set_from_file = _refuse
    _write_file = to = type = cuda = _refuse


class HostCopy(torch.UntypedStorage):
    """Memory that `torch.distributed.checkpoint.async_save` makes of the class of a storage, to copy the storage into it."""

    def copy_(self, source: Any, non_blocking: bool | None = None) -> Any:
        """Copy the bytes of a storage, also of one whose value is off the device."""
        if isinstance(source, OffloadedStorage):
            mine = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            mine.copy_(source.host_value().view(torch.uint8))
        else:
            super().copy_(source, non_blocking)
        return self


class SavedStorage(torch.UntypedStorage):
    """The storage that a pickled value refers to.

    `torch.save` keeps every storage until its end and asks those that aren't in host memory for `cpu()` when it writes them: so
    one value at a time is loaded.
    """

    unit: Unit

    def nbytes(self) -> int:
        """Return the bytes of the value."""
        return self.unit.bytes

    size = nbytes

    def data_ptr(self) -> int:
        """Nowhere: it is written by its identity."""
        return 0

    def cpu(self) -> torch.UntypedStorage:
        """Return the bytes in host memory, to be read and dropped."""
        return storage_of(self.unit).host_value().untyped_storage()

    def _write_file(self, *arguments: Any) -> None:
        self.cpu()._write_file(*arguments)  # the format of files before PyTorch 1.6, and of pickle

    def __reduce__(self) -> Any:
        return _by_value(self)


def storage_of(unit: Unit) -> OffloadedStorage:
    """Return the storage of a unit's values."""
    with _lock:
        storage = _storages.get(id(unit))
        if storage is None:
            storage = OffloadedStorage(0, device="meta")
            storage.unit, storage._pinned, storage._for_saving = unit, None, None
            _storages[id(unit)] = storage
        return storage


_NO_MEMORY: tuple[tuple[int], dict[str, str]] = (0,), {"device": "meta"}
"""The arguments with which `storage_of` makes a storage."""


def _with_class_of_copies(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    memory.__class__ = HostCopy
    return memory


def is_read_later(unit: Unit) -> bool:
    """Say whether somebody refers to a value of a unit that is loaded when it is read."""
    with _lock:
        return id(unit) in _storages


def _by_value(storage: OffloadedStorage | SavedStorage) -> tuple[Any, ...]:
    """Pickle a storage itself, as queues between processes do."""
    content = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    return _from_bytes, (content.numpy().tobytes(),)


def _from_bytes(content: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().untyped_storage()


def _location(storage: Any) -> str | None:
    """Tell `torch.save` what a loaded storage's place is to be: that of the parameter."""
    if isinstance(storage, SavedStorage):
        return torch.serialization.location_tag(torch.empty(0, device=storage.unit.device).untyped_storage())
    if isinstance(storage, OffloadedStorage):
        storage._refuse()
    return None


torch.serialization.register_package(0, _location, lambda storage, location: None)
