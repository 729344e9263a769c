"""Reads pickles without executing anything in them: classes and functions that they name stay names.

Note: why nothing is executed
    The pickle is run on a machine of our own. It knows the opcodes that build plain values; a global is only ever looked up
    in the table that the caller gives, whose functions check their arguments. Any other global is an `Unknown`: not imported,
    not called; what a pickle would call it with, or set on it, is kept beside its name. `pickle` itself is never used, nor are
    `copyreg`, the registry of extensions, `__setstate__` or `__reduce__`.

Called by `torch_archive`; knows no tensors.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from zinf_compile.errors import CheckpointError

MOST_BYTES = 1 << 28
"""Of a pickle, without the tensors."""


@dataclasses.dataclass(eq=False)
class Unknown:
    """A class or function that a pickle names, or what it would make of one."""

    name: str
    """Module and name."""
    arguments: tuple[Any, ...] = ()
    made: bool = False
    """True for what the pickle would make by calling it."""
    state: Any = None
    """What it would set: usually its attributes by name."""
    items: list[Any] = dataclasses.field(default_factory=list)

    def attribute(self, name: str) -> Any:
        """Return an attribute that the pickle would set, None where it sets none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


Known = Mapping[str, Callable[..., Any] | Any]
"""Globals by module and name: a function, called with the arguments in the pickle, or any other value."""

_MARK = object()
_MOST_NESTED = 20
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_PLAIN = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "FLOAT", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING", "BINSTRING", "SHORT_BINSTRING",
})  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, known: Known, persistent: Callable[[Any], Any], where: str) -> Any:
    """Return the value that a pickle describes; `persistent` gives the objects that it refers to.

    Raises `CheckpointError`, naming the file `where`, for a pickle that is damaged or has other opcodes than values need.
    """
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{where} has a pickle of {len(data):,} bytes; accepted: {MOST_BYTES:,} at most")
    try:
        return _Machine(known, persistent).run(data)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{where} is damaged: its pickle can't be read ({type(error).__name__}: {error})") from error


class _Machine:
    def __init__(self, known: Known, persistent: Callable[[Any], Any]) -> None:
        self._known, self._persistent = known, persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                (value,) = self._stack
                return value
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _PLAIN:
                self._stack.append(argument)
            elif name in _TUPLES:
                count = _TUPLES[name]
                self._push(tuple(self._take(count)))
            elif (act := getattr(self, f"_op_{name.lower()}", None)) is not None:
                act(argument)
            else:
                raise CheckpointError(f"its pickle has the opcode {name}, which no saved state needs; nothing was executed")
        raise ValueError("it has no end")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark is where a value is expected")
        return value

    def _take(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark is where a value is expected")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        found = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def _op_proto(self, version: int) -> None:
        if version > 5:
            raise ValueError(f"protocol {version}")

    def _op_frame(self, _: int) -> None:
        """Frames say how to read the file, nothing else."""

    def _op_mark(self, _: None) -> None:
        self._stack.append(_MARK)

    def _op_pop(self, _: None) -> None:
        self._stack.pop()

    def _op_pop_mark(self, _: None) -> None:
        self._to_mark()

    def _op_dup(self, _: None) -> None:
        self._push(self._top())

    def _op_empty_list(self, _: None) -> None:
        self._push([])

    def _op_empty_dict(self, _: None) -> None:
        self._push({})

    def _op_empty_set(self, _: None) -> None:
        self._push(set())

    def _op_list(self, _: None) -> None:
        self._push(self._to_mark())

    def _op_tuple(self, _: None) -> None:
        self._push(tuple(self._to_mark()))

    def _op_dict(self, _: None) -> None:
        found: dict[Any, Any] = {}
        _set_items(found, self._to_mark())
        self._push(found)

    def _op_frozenset(self, _: None) -> None:
        self._push(frozenset(map(_key, self._to_mark())))

    def _op_append(self, _: None) -> None:
        value = self._pop()
        _extend(self._top(), [value])

    def _op_appends(self, _: None) -> None:
        values = self._to_mark()
        _extend(self._top(), values)

    def _op_additems(self, _: None) -> None:
        values = self._to_mark()
        _extend(self._top(), values)

    def _op_setitem(self, _: None) -> None:
        pair = self._take(2)
        _set_items(self._top(), pair)

    def _op_setitems(self, _: None) -> None:
        pairs = self._to_mark()
        _set_items(self._top(), pairs)

    def _op_put(self, number: int) -> None:
        self._memo[number] = self._top()

    _op_binput = _op_long_binput = _op_put

    def _op_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._top()

    def _op_get(self, number: int) -> None:
        self._push(self._memo[number])

    _op_binget = _op_long_binget = _op_get

    def _op_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push(self._find(module, name))

    def _op_stack_global(self, _: None) -> None:
        module, name = self._take(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("the name of a class is no text")
        self._push(self._find(module, name))

    def _find(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return _Function(full, self._known[full]) if callable(self._known.get(full)) else self._known.get(full, Unknown(full))

    def _op_reduce(self, _: None) -> None:
        callee, arguments = self._take(2)
        self._push(_called(callee, arguments))

    _op_newobj = _op_reduce

    def _op_newobj_ex(self, _: None) -> None:
        callee, arguments, named = self._take(3)
        self._push(_called(callee, (*arguments, named)) if named else _called(callee, arguments))

    def _op_build(self, _: None) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, Unknown):
            target.state = state  # anything else, such as an ordered dict, has no attributes that matter

    def _op_persid(self, argument: str) -> None:
        self._push(self._persistent(argument))

    def _op_binpersid(self, _: None) -> None:
        self._push(self._persistent(self._pop()))


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
    """A known function, which a pickle can call and do nothing else with."""

    name: str
    function: Callable[..., Any]


def _called(callee: Any, arguments: Any) -> Any:
    if not isinstance(arguments, tuple):
        raise TypeError(f"arguments that are a {type(arguments).__name__}")
    if isinstance(callee, _Function):
        return callee.function(*arguments)
    if isinstance(callee, Unknown) and not callee.made:
        return Unknown(callee.name, arguments, made=True)
    raise TypeError(f"a {type(callee).__name__} is called")


def _key(value: Any) -> Any:
    """Return a key of a dict or an item of a set; tuples may be nested as deeply as their hash can be taken."""
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [inner for each in level if isinstance(each, tuple | frozenset) for inner in each]
        if not level:
            return value
    raise ValueError("a key is nested too deeply")


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, set):
        target.update(map(_key, values))
    elif isinstance(target, Unknown):
        target.items.extend(values)
    else:
        raise TypeError(f"a {type(target).__name__} is appended to")


def _set_items(target: Any, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise ValueError("a key without a value")
    items = zip(pairs[::2], pairs[1::2], strict=True)
    if isinstance(target, Unknown):
        target.items.extend(items)
    elif isinstance(target, dict):
        target.update((_key(key), value) for key, value in items)
    else:
        raise TypeError(f"an item of a {type(target).__name__} is set")
