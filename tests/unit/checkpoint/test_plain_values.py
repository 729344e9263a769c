"""Plain values survive JSON; what is none is named."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.checkpoint.plain_values import decode, encode
from zinf_compile.checkpoint.strict_json import parse_object
from zinf_compile.errors import CheckpointError

TEXT = st.text(st.characters())  # surrogates, too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.sampled_from([torch.bfloat16]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXT | st.integers(), inner),
    max_leaves=10,
)


@given(VALUES)
def test_values_survive(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps({"extra": encode(value, "extra", tensors)}, allow_nan=False)
    found = decode(parse_object(text)["extra"], "extra", tensors)
    assert found == value
    assert repr(found) == repr(value)  # types too: 1 is no True, (1,) no [1], -0.0 no 0.0


def test_tensors_and_what_is_no_number() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), math.nan], 3: (torch.zeros(()), math.inf)}
    found = decode(json.loads(json.dumps(encode(value, "extra", tensors))), "extra", tensors)
    assert set(tensors) == {"extra.a.0", "extra.3.0"}
    assert found["a"][0] is value["a"][0]
    assert math.isnan(found["a"][1])
    assert found[3] == (value[3][0], math.inf)


def test_numbers_and_arrays_of_numpy() -> None:
    generator = np.random.RandomState(3)
    array = np.arange(6.0).reshape(2, 3)[::-1, ::2]  # of negative strides
    value = {
        "state": generator.get_state(),
        "best": np.float32(0.1),
        "epoch": np.int64(3),
        "done": np.bool_(True),
        "array": array,
    }
    tensors: dict[str, torch.Tensor] = {}
    found = decode(json.loads(json.dumps(encode(value, "extra", tensors))), "extra", tensors)
    expected, array[:] = array.copy(), 0  # what is saved is a copy
    np.testing.assert_array_equal(found["array"], expected, strict=True)
    assert (found["best"], found["epoch"], found["done"]) == (float(np.float32(0.1)), 3, True)
    again = np.random.RandomState(0)
    again.set_state(found["state"])
    assert again.randint(1 << 30) == generator.randint(1 << 30)


def test_places_that_read_alike_are_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    one, two, three, four = (torch.full((2,), number) for number in range(4))
    value = {"a": {"b.c": one}, "a.b": {"c": two}, "d": {1: three, "1": four}}
    found = decode(json.loads(json.dumps(encode(value, "extra", tensors))), "extra", tensors)
    assert [found["a"]["b.c"], found["a.b"]["c"], found["d"][1], found["d"]["1"]] == [one, two, three, four]


def nested(count: int, kind: type) -> Any:
    """Return so many of a kind inside of each other."""
    value: Any = math.inf
    for _ in range(count):
        value = {"a": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x": object()}, r"extra\.x is a object; accepted: None, bool, int"),
        ({(1, 2): 3}, r"extra has the key \(1, 2\), a tuple; accepted"),
        ([torch.ones(2).to_sparse()], r"extra\.0 is a Tensor of layout torch\.sparse_coo; accepted"),
        ([lambda: 0], r"extra\.0 is a function; accepted"),
        ({"names": np.array(["a", "b"])}, r"extra\.names is a numpy array of <U1; accepted: .* arrays of numbers"),
        ([np.arange(2, dtype=">i4")], r"extra\.0 is a numpy array of >i4; accepted"),
        ([torch.ones(2, device="meta")], r"extra\.0 is a tensor on meta, without values; accepted"),
        ({"\udce9": object()}, r"extra\.\\udce9 is a object; accepted"),
        ({"x": -(10**4300)}, r"extra\.x is a whole number of 14,285 bits; accepted: at most 4,300 digits\. Save it as a str"),
        ({10**4300: 1}, r"a key of extra is a whole number of 14,285 bits; accepted: at most 4,300 digits"),
        (nested(600, dict), r"extra(\.a)+\.* is nested too deeply; accepted: 125 levels, of which a dict takes three, a"),
        (nested(600, list), r"extra(\.0)+\.* is nested too deeply"),
        (nested(600, tuple), r"extra(\.0)+\.* is nested too deeply"),
    ],
)
def test_what_is_not_plain(value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        encode(value, "extra", {})


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1}, {"tensor": "gone"}, {"dtype": "nn"}, {"float": "1e"}, {"dict": [[1.5, 2]]}, {"array": "gone"}, {},
        {"text": "zz"}, {"text": "ff"}, {"text": 1}, {"dict": [[{"text": "ff"}, 2]]},
    ],
)  # fmt: skip
def test_what_no_save_has_written(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.0 in the manifest is .*, which no save has written: was it edited\?"):
        decode([value], "extra", {})
