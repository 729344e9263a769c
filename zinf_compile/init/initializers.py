"""Initialisers of a model's modules, in the order in which building it runs them."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, cast

import torch
from torch import nn

from zinf_compile.errors import UnsupportedModelError

Step = tuple[nn.Module, Callable[[], object]]
"""An initialiser, and the module whose it is."""

_RESETS = ("reset_parameters", "_reset_parameters")
_UNREPEATABLE = frozenset(
    {
        "apply", "deepcopy", "_get_clones", "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial",
        "init_weights", "_init_weights", "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_",
        "xavier_uniform_", "xavier_normal_", "orthogonal_", "sparse_", "random_", "exponential_", "bernoulli_",
    }
)  # fmt: skip
"""Names in a constructor that show it to give, copy or draw values by itself."""

_KNOWN: dict[str, Callable[[Any], object]] = {
    "transformers.pytorch_utils.Conv1D": lambda module: (
        nn.init.normal_(module.weight, std=0.02),
        nn.init.zeros_(module.bias),
    ),
}
"""Initialisers of classes that initialise in their constructor alone."""


def steps_of(model: nn.Module, *, strict: bool) -> Iterator[Step]:
    """Yield the initialisers in the order of construction: children first.

    `strict`: raise `UnsupportedModelError` for a class whose constructor gives values in a way that can't be done again from
    outside, and for a module with tensors of its own that nothing initialises.
    """
    if strict:
        _reject_unrepeatable(model)
    for module, _ in in_order(model):
        construct = initialiser_of(module)
        if construct is not None:
            yield module, construct
        if initialises_all(module):
            yield module, cast(Any, module).initialize_weights


def in_order(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each module and its name once, children before their parent, as they were constructed."""
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name)
        yield module, name

    return visit(model, "")


def initialiser_of(module: nn.Module) -> Callable[[], object] | None:
    """Return what the module's constructor calls to give its tensors their values; None where nothing is known."""
    kind = type(module)
    known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    if known is not None:
        return lambda: known(module)
    own = any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))
    names = _names_in_constructor(kind)
    mentioned = [name for name in _RESETS if name in names]
    for name in mentioned or (_RESETS if own else ()):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def initialises_all(module: nn.Module) -> bool:
    """Return whether the module is a model of transformers that initialises all below it at the end of its constructor."""
    return callable(getattr(module, "initialize_weights", None)) and "post_init" in _names_in_constructor(type(module))


def pretrained_model_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost model of transformers that a module belongs to: its `_init_weights` is the module's."""
    found, path = None, ""
    for part in ("", *name.split(".")) if name else ("",):
        path = f"{path}.{part}" if path and part else part
        module = model.get_submodule(path)
        if callable(getattr(module, "initialize_weights", None)) and callable(getattr(module, "_init_weights", None)):
            found = module
    return found


def _reject_unrepeatable(model: nn.Module) -> None:
    for module, name in in_order(model):
        kind = type(module)
        where = f"module {name or '(the model)'} ({kind.__module__}.{kind.__qualname__})"
        known = f"{kind.__module__}.{kind.__qualname__}" in _KNOWN
        odd = set() if known else _names_in_constructor(kind) & _UNREPEATABLE
        if initialises_all(module):
            odd.discard("deepcopy")  # of a configuration, for encoder and decoder
        if odd:
            raise UnsupportedModelError(
                f"{where} gives values in its constructor ({', '.join(sorted(odd))}), which can't be done again from outside. "
                f"{_WAYS_OUT}"
            )
        own = [n for n, value in (*module._parameters.items(), *module._buffers.items()) if _has_no_value(value)]
        if own and initialiser_of(module) is None and pretrained_model_of(model, name) is None:
            raise UnsupportedModelError(
                f"{where} has no initialiser for {', '.join(own)}: neither reset_parameters nor transformers' _init_weights. "
                f"{_ways_out(model, [f'{name}.{n}' if name else n for n in own])}"
            )


_WAYS_OUT = (
    "Give partition(init=...), called with each module, or checkpoint=...; or build the model, not on meta, inside "
    '`with zinf_compile.partitioned(...):`. A buffer may also be made with device="cpu"'
)


_WAYS_OUT_BESIDE_CHECKPOINTS = (
    'No checkpoint has what is not persistent: make it with device="cpu", in its constructor or by assigning it to the model on '
    "meta; let its module's reset_parameters() fill it, or partition(init=...) without checkpoint=, and load() a checkpoint "
    "then; or build the model, not on meta, inside `with zinf_compile.partitioned(...):`"
)


def explain_untouched(model: nn.Module, names: list[str]) -> UnsupportedModelError:
    """Return the error for tensors of a model that no initialiser gave a value."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return UnsupportedModelError(
        f"no initialiser gave {shown} a value; the model is on meta as before. {_ways_out(model, names)}"
    )


def _ways_out(model: nn.Module, names: list[str]) -> str:
    """Return what to do about tensors without a value."""
    owners = [(model.get_submodule(owner), attribute) for owner, _, attribute in (name.rpartition(".") for name in names)]
    lacking = all(attribute in owner._non_persistent_buffers_set for owner, attribute in owners)
    return _WAYS_OUT_BESIDE_CHECKPOINTS if lacking else _WAYS_OUT


def _has_no_value(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "meta"


def replaced_when_tied(model: nn.Module) -> set[tuple[str, str]]:
    """Return which parameters constructors assign to: `self.head.weight = self.embedding.weight` gives ("head", "weight").

    What such a module was initialised with is gone. A tied parameter's object doesn't tell which module has made it.
    """
    found: set[tuple[str, str]] = set()
    for kind in {type(module) for module in model.modules()}:
        for code in _constructors(kind):
            for before, after in itertools.pairwise(dis.get_instructions(code)):
                if after.opname == "STORE_ATTR" and before.opname == "LOAD_ATTR":
                    found.add((before.argval, after.argval))
    return found


def _names_in_constructor(kind: type[nn.Module]) -> set[str]:
    """Return the functions and attributes that the class's constructors mention, those of its bases included."""
    return set().union(*map(_names_in, _constructors(kind)))


def _constructors(kind: type[nn.Module]) -> Iterator[CodeType]:
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("__init__", int)), "__code__", None)
        if base is not nn.Module and isinstance(code, CodeType):
            yield code


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
