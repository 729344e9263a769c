"""Hostile pickles: nothing in them is imported or called, and what they say of tensors is believed of no byte."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.checkpoint.pickled import Unknown, read_pickle
from zinf_compile.checkpoint.torch_archive import ArchivedTensor, TorchArchive
from zinf_compile.errors import CheckpointError

_calls: list[object] = []


def called(*arguments: object) -> object:
    """Note that a pickle was executed."""
    _calls.append(arguments)
    return arguments


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def read(data: bytes, known: dict[str, Any] | None = None) -> Any:
    return read_pickle(data, known or {}, lambda reference: ("persistent", reference), "a file")


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


EXPLOITS: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda mark: pickle.dumps(Reduced(os.system, f"touch {mark}")),
    "os.system, protocol 0": lambda mark: f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(),
    "builtins.eval": lambda mark: pickle.dumps(Reduced(eval, f"open({str(mark)!r}, 'w')")),
    "builtins.exec": lambda mark: pickle.dumps(Reduced(exec, f"open({str(mark)!r}, 'w')")),
    "a global within a module": lambda mark: b"\x80\x04" + short("os") + short("path.os.system") + b"\x93"
    + short(f"touch {mark}") + b"\x85R.",
    "getattr": lambda mark: b"\x80\x04" + short("builtins") + short("getattr") + b"\x93" + short("os") + short("system")
    + b"\x86R" + short(f"touch {mark}") + b"\x85R.",
    "inst": lambda mark: f"(S'touch {mark}'\nios\nsystem\n.".encode(),
    "obj": lambda mark: f"(cos\nsystem\nS'touch {mark}'\no.".encode(),
    "newobj": lambda mark: b"\x80\x04" + global_("subprocess", "Popen") + b"]" + short("touch") + b"a" + short(str(mark))
    + b"a\x85\x81.",
    "newobj_ex": lambda mark: b"\x80\x04" + global_("subprocess", "Popen") + b")}" + short("args") + b"]" + short("touch") + b"a"
    + short(str(mark)) + b"as\x92.",
    "extension": lambda mark: b"\x80\x02\x82\xf0" + short(str(mark)) + b"\x85R.",
    "build": lambda mark: b"\x80\x04" + global_("test_pickled", "Reduced") + b")\x81}" + short("__setstate__")
    + global_("os", "system") + b"sb" + short(f"touch {mark}") + b"b.",
    "an ordered dict that is built": lambda mark: global_("collections", "OrderedDict") + b")R}" + short("__class__")
    + global_("os", "system") + b"sb.",
    "torch._utils": lambda mark: global_("torch._utils", "_rebuild_device_tensor_from_numpy")
    + global_("os", "system") + b"\x85R.",
    "torch.load": lambda mark: global_("torch", "load") + short(str(mark)) + b"\x85R.",
    "codecs": lambda mark: b"\x80\x02" + global_("_codecs", "encode") + short("a") + short("rot13") + b"\x86R.",
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLOITS)
def test_nothing_is_executed(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    data = EXPLOITS[name](mark)
    modules = set(sys.modules)
    known = {"collections.OrderedDict": dict}
    with contextlib.suppress(CheckpointError):
        read(data, known)
    assert not mark.exists()
    assert set(sys.modules) - modules <= set(), "nothing was imported"
    path = tmp_path / "saved.pt"
    path.write_bytes(archived(data))
    with pytest.raises(CheckpointError):
        zinf_compile.load(path, nn.Linear(2, 2))
    assert not mark.exists()


def test_a_module_that_is_not_imported_stays_so() -> None:
    assert "this" not in sys.modules
    found = read(b"\x80\x04" + short("this") + short("s") + b"\x93.")
    assert (type(found), found.name) == (Unknown, "this.s")
    assert "this" not in sys.modules


def test_classes_are_placeholders_with_what_would_be_set() -> None:
    found = read(pickle.dumps({"a": collections.Counter("aab"), "b": Reduced(called, 1), "c": called}))
    assert found["a"].name == "collections.Counter"
    assert (found["b"].name, found["b"].arguments, found["b"].made) == (f"{called.__module__}.called", (1,), True)
    assert found["c"].made is False
    assert _calls == []


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read(protocol: int) -> None:
    shared = [1]
    value = {
        "numbers": [0, 1, -1, 255, 65536, 1 << 40, -(1 << 80), 0.5, float("inf"), True, False, None],
        "text": "a ü \U0001f600" * 100, "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], 5: {"nested": {}},
        "shared": [shared, shared],
    }  # fmt: skip
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert found["shared"][0] is found["shared"][1]
    if protocol >= 4:
        assert read(pickle.dumps({"set": {1, 2}, "frozen": frozenset((3,)), "bytes": b"ab"}, protocol))["set"] == {1, 2}


DAMAGED = {
    "empty": b"", "no end": b"\x80\x02]", "nothing": b".", "two values": b"NN.", "no memo": b"h\x05.", "no mark": b"t.",
    "odd items": b"}(NNNu.", "a mark as a value": b"](a.", "append to a number": b"K\x01Na.", "set on a number": b"K\x01NNs.",
    "a list as a key": b"}]Ns.", "a call of text": b"\x80\x02X\x01\x00\x00\x00a)R.", "arguments in a list": b"ca\nb\n]R.",
    "protocol 9": b"\x80\x09N.", "a length beyond": b"X\xff\xff\xff\x7fa.", "names of numbers": b"\x80\x04K\x01K\x01\x93.",
    "a made thing called": b"ca\nb\n)R)R.", "bytearray": b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.",
    "deep key": b"}" + b"N" + b"\x85" * 200_000 + b"Ns.", "an unknown opcode": b"\xff.",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pickles_are_errors(name: str) -> None:
    with pytest.raises(CheckpointError, match="a file"):
        read(DAMAGED[name])


def archived(data: bytes, storages: dict[str, bytes] | None = None, **members: bytes) -> bytes:
    """Return a file as `torch.save` writes one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        for key, content in (storages or {}).items():
            file.writestr(f"archive/data/{key}", content)
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(offset: bytes, shape: bytes, stride: bytes, *, numel: int = 4, key: str = "0", kind: str = "FloatStorage") -> bytes:
    """Return a pickle of one tensor under the name "w"."""
    storage = b"(" + short("storage") + global_("torch", kind) + short(key) + short("cpu") + number(numel) + b"tQ"
    arguments = b"(" + storage + offset + shape + stride + b"\x89" + global_("collections", "OrderedDict") + b")Rt"
    return b"\x80\x02}" + short("w") + global_("torch._utils", "_rebuild_tensor_v2") + arguments + b"Rs."


FOUR = struct.pack("<4f", 1, 2, 3, 4)
GOOD = (number(0), sizes(2, 2), sizes(2, 1))

HOSTILE: dict[str, bytes] = {
    "an offset beyond": archived(tensor(number(1), sizes(2, 2), sizes(2, 1)), {"0": FOUR}),
    "an offset far beyond": archived(tensor(number(1 << 61), sizes(1), sizes(1)), {"0": FOUR}),
    "an offset before": archived(tensor(number(-1), sizes(1), sizes(1)), {"0": FOUR}),
    "strides beyond": archived(tensor(number(0), sizes(2, 2), sizes(3, 1)), {"0": FOUR}),
    "strides back": archived(tensor(number(3), sizes(2), sizes(-1)), {"0": FOUR}),
    "a huge shape": archived(tensor(number(0), sizes(1 << 40, 1 << 40), sizes(0, 0)), {"0": FOUR}),
    "more elements than there are": archived(tensor(number(0), sizes(1 << 30), sizes(0)), {"0": FOUR}),
    "a negative shape": archived(tensor(number(0), sizes(-2, -2), sizes(2, 1)), {"0": FOUR}),
    "fewer strides": archived(tensor(number(0), sizes(2, 2), sizes(2)), {"0": FOUR}),
    "text as an offset": archived(tensor(short("0"), sizes(2, 2), sizes(2, 1)), {"0": FOUR}),
    "True as an offset": archived(tensor(b"\x88", sizes(1), sizes(1)), {"0": FOUR}),
    "a list as a shape": archived(tensor(number(0), b"]", sizes(1)), {"0": FOUR}),
    "a storage that is missing": archived(tensor(*GOOD, key="1"), {"0": FOUR}),
    "a storage outside": archived(tensor(*GOOD, key="../data.pkl"), {"0": FOUR}),
    "a shorter storage": archived(tensor(*GOOD), {"0": FOUR[:-4]}),
    "a longer storage": archived(tensor(*GOOD, numel=5, ), {"0": FOUR}),
    "a negative storage": archived(tensor(*GOOD, numel=-4), {"0": FOUR}),
    "a storage of no class": archived(tensor(*GOOD, kind="system"), {"0": FOUR}),
    "bytes without a type": archived(tensor(*GOOD, kind="UntypedStorage", numel=16), {"0": FOUR}),
    "big-endian": archived(tensor(*GOOD), {"0": FOUR}, byteorder=b"big"),
    "no storage": archived(b"\x80\x02}" + short("w") + global_("torch._utils", "_rebuild_tensor_v2") + b"(NNNNNNtRs."),
    "too few arguments": archived(b"\x80\x02}" + short("w") + global_("torch._utils", "_rebuild_tensor_v2") + b")Rs."),
    "a parameter of text": archived(
        b"\x80\x02}" + short("w") + global_("torch._utils", "_rebuild_parameter") + short("a") + b"\x85Rs."
    ),
    "no pickle": archived(b"")[:30], "not a zip": b"PK\3\4" + bytes(100), "an old file": pickle.dumps({"w": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"saved\.pt"):
        TorchArchive(path)


def test_a_good_tensor_is_read_by_ranges(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(archived(tensor(*GOOD), {"0": FOUR}))
    archive = TorchArchive(path)
    found = archive.value["w"]
    assert isinstance(found, ArchivedTensor)
    found.read(1, into := torch.empty(2))
    assert into.tolist() == [2, 3]
    archive.close()


def test_a_compressed_storage_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "saved.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", tensor(*GOOD))
        file.writestr("archive/data/0", FOUR)
    with pytest.raises(CheckpointError, match="is compressed"):
        TorchArchive(tmp_path / "saved.pt")


def test_what_torch_writes_is_what_is_read(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    value = {
        "rows": base.view(4, 6), "columns": base.view(4, 6).t(), "later": base[3:7], "number": torch.tensor(5),
        "none": torch.zeros(0, 3), "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "half": base.bfloat16(),
        "bool": base > 3, "parameter": nn.Parameter(base.clone()), "f8": base.to(torch.float8_e4m3fn),
        "u16": base.to(torch.uint16),
        "complex": torch.complex(base, base),
    }  # fmt: skip
    torch.save(value, tmp_path / "saved.pt")
    archive = TorchArchive(tmp_path / "saved.pt")
    for name, tensor_ in value.items():
        found = archive.value[name]
        assert found.dtype == tensor_.dtype, name
        assert found.shape == tuple(tensor_.shape), name
        assert torch.equal(found.whole().reshape(-1).view(torch.uint8), tensor_.detach().reshape(-1).view(torch.uint8)), name
        if tensor_.numel() > 5:
            found.read(3, into := torch.empty(2, dtype=tensor_.dtype))
            assert torch.equal(into.view(torch.uint8), tensor_.detach().reshape(-1)[3:5].view(torch.uint8)), name
    archive.close()


def test_values_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    torch.save({"model": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "more": value}, tmp_path / "saved.pt")
    with pytest.raises(CheckpointError, match="more than 1,048,576 values"):
        zinf_compile.load(tmp_path / "saved.pt", nn.Linear(2, 2))
