"""What scripts do to `optimizer.state`, with an optimizer and its parameters; and the comparison of what they get to see."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer
from training import assert_same


class OtherMapping(MutableMapping[Any, Any]):
    """No dict: what it lacks it makes, as eager optimizers expect."""

    def __init__(self, content: Mapping[Any, Any] = types.MappingProxyType({})) -> None:
        self.content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self.content.setdefault(key, {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def __contains__(self, key: object) -> bool:
        return key in self.content


def clear(optimizer: Optimizer, _: Any) -> None:
    optimizer.state.clear()


def pop(optimizer: Optimizer, parameters: list[torch.Tensor]) -> Any:
    return sorted(optimizer.state.pop(parameters[1]))


def clear_one(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    optimizer.state[parameters[0]].clear()


def another_mapping(optimizer: Optimizer, _: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def a_mapping_of_a_class_of_its_own(optimizer: Optimizer, _: Any) -> None:
    optimizer.state = OtherMapping()  # type: ignore[assignment]


def some_moved_to_another_mapping(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """The first keeps its states, the second is given the third's, the others have none any more."""
    old = optimizer.state
    same = copy.deepcopy(dict(old[parameters[2]])) if parameters[2].shape == parameters[1].shape else dict(old[parameters[1]])
    optimizer.state = collections.defaultdict(dict, {parameters[0]: old[parameters[0]], parameters[1]: same})


def replace_an_entry(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    parameter = parameters[1]
    optimizer.state[parameter] = {name: value * 0.5 for name, value in optimizer.state[parameter].items()}


def restart_momentum(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[bool]:
    found = []
    for parameter in parameters:
        found.append("momentum_buffer" in optimizer.state[parameter])
        if found[-1]:
            optimizer.state[parameter]["momentum_buffer"].zero_()
    return found


def delete_momentum(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    for parameter in parameters[::2]:
        del optimizer.state[parameter]["momentum_buffer"]


def forget_momentum(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    optimizer.state[parameters[0]]["momentum_buffer"] = None


def scale_and_assign(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    state = optimizer.state[parameters[0]]
    for name in list(state):
        state[name] *= 0.5
        state[name] = state[name] + 0.25
    state.update({name: value.clone() for name, value in state.items()})
    return [value.clone() for value in state.values()]


def through_an_alias(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Changed through a view that outlives the tensor, and through numpy's."""
    for parameter in parameters[:2]:
        name = next(name for name in optimizer.state[parameter] if name != "step")
        flat = optimizer.state[parameter][name].view(-1)[::2]
        gc.collect()
        flat.mul_(0.25)
        optimizer.state[parameter][name].detach().numpy().reshape(-1)[:3] += 0.5


def read(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        found += [list(state), len(state), bool(state), "step" in state, state.get("nothing", 3), [*state.items()]]
        found += [{**state}, dict(state), state.copy(), copy.copy(state), copy.deepcopy(state), state | {}, {} | state]
        found += [pickle.loads(pickle.dumps(dict(state)))]
    return found


def setdefault(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[Any]:
    state = optimizer.state[parameters[0]]
    return [state.setdefault(name, 1).clone() for name in list(state)]


EVERY = [
    clear, pop, clear_one, another_mapping, a_mapping_of_a_class_of_its_own, some_moved_to_another_mapping, replace_an_entry,
    scale_and_assign, through_an_alias, read, setdefault,
]  # fmt: skip


def same(expected: Any, found: Any) -> None:
    """Compare nested results; mappings by their keys, in whatever order."""
    if isinstance(expected, torch.Tensor):
        assert_same("what was read", expected, found)
    elif isinstance(expected, Mapping):
        assert expected.keys() == found.keys()
        assert type(found) is dict
        for name, value in expected.items():
            same(value, found[name])
    elif isinstance(expected, list | tuple) and expected and isinstance(expected[0], tuple):
        same(dict(expected), dict(found))
    elif isinstance(expected, list | tuple) and all(isinstance(name, str) for name in expected):
        assert sorted(expected) == sorted(found)
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            same(one, other)
    else:
        assert expected == found
