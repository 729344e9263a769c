"""What is found on the stack isn't held by it."""

from __future__ import annotations

import weakref
from typing import Any

from zinf_compile._frames import callers


class Caller:
    def call(self) -> list[Any]:
        mine = self
        found = list(callers())
        assert mine is self, "the method's own variables are as they were"
        return found

    def call_from_inside(self) -> list[Any]:
        def inside() -> list[Any]:
            return self.call()

        return inside()


def test_the_objects_whose_methods_are_on_the_stack() -> None:
    caller, other = Caller(), Caller()
    assert caller.call()[0] is caller
    assert [each is other for each in other.call_from_inside()[:2]] == [True, True]


def test_a_function_that_called_can_drop_what_it_had() -> None:
    """Before Python 3.13 frames keep the locals that were looked at."""
    caller, dropped = Caller(), Caller()
    reference = weakref.ref(dropped)
    caller.call()
    del dropped
    assert reference() is None
