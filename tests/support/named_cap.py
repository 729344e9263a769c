"""The cap that a refusal names."""

from __future__ import annotations

import re


def named_cap(refusal: object) -> int:
    """Return the `device_memory` that works, in bytes, as an error or its text says: the smallest, where that is known."""
    (found,) = re.findall(r"(?:[Tt]he smallest(?: device_memory)?|[Aa] device_memory) that works is ([\d,]+)", str(refusal))
    return int(found.replace(",", ""))
