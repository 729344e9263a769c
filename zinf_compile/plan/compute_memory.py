"""Memory of compute, as the plan counts it beside parameters: saved activations, and temporaries."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeMemory:
    """The most that one graph's compute holds on the device, in bytes: an upper bound, from the graph alone."""

    activations: int = 0
    """At the peak: values kept from forward to backward, the graph's inputs, and its results that the caller keeps."""
    temporaries: int = 0
    """At the peak: values that the graph makes and drops again. Gradients that stay are there too by then, but for those that a
    backward makes later: these are taken off, as the account of gradients has all of them."""
    outside: int = 0
    """Tensors that are neither the graph's nor the runtime's, and what the allocator rounds up."""
    saved: int = 0
    """Values that a forward leaves to its backward, and its results."""
    results: int = 0
    """The results of a forward, of which the caller may still hold the last call's while the next one runs."""

    @property
    def peak(self) -> int:
        """The most at once."""
        return self.activations + self.temporaries + self.outside


NO_COMPUTE = ComputeMemory()
"""Where no account is kept of compute: without a declared cap."""
