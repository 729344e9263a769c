"""What the allocator holds at the peak is within the cap, from the first step on: whatever lives where, and however steps go."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import more
from peak_cases import Case, peak_beside_cap
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def check(case: Case, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            found = [peak_beside_cap(0, 1, case, folder)]
        else:
            found = run_ranks(peak_beside_cap, ranks, case, folder, backend="late")
    for rank, (cap, peak, text) in enumerate(found):
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,} on rank {rank}: {case}\n{text}"


HOST = ("host", "device", "host", "keep")


@pytest.mark.parametrize(
    "case",
    [
        Case(share=0.2625),  # some states on the device: they come with the first step, when the gathers of one are known
        Case("wide", HOST, batches=(1, 2, 2), share=0.0),  # second gradients after the first step
        Case("wide", HOST, batches=(1, 1, 2), share=0.3),
        Case("wide", HOST, batches=(1, 1), share=0.3, taken=1 << 19),
        more(Case("wide", ("host", "host", "nvme", "auto"), clipped=True, optimizers=("AdamW", "SGD"), share=0.2)),
    ],
)
def test_a_peak_is_within_the_cap(case: Case) -> None:
    check(case, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [Case("wide", HOST, batches=(1, 2), clipped=True, share=0.2)])
def test_a_peak_is_within_the_cap_of_each_rank(case: Case) -> None:
    check(case, 2)


HOMES = st.sampled_from(["auto", "device", "host", "nvme"])
CASES = st.builds(
    Case,
    model=st.sampled_from(["wide", "experts", "gpt", "pictures"]),
    words=st.tuples(HOMES, HOMES, HOMES, st.sampled_from(["auto", "keep", "host", "nvme", "recompute"])),
    batches=st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple),
    clipped=st.booleans(),
    optimizers=st.sampled_from([("AdamW",), ("SGD",), ("AdamW", "SGD"), ("AdamW", "AdamW")]),
    share=st.floats(0, 1),
    taken=st.sampled_from([0, 0, 1 << 12, 1 << 19]),
)


@pytest.mark.thorough
@pytest.mark.distributed
@settings(max_examples=60, deadline=None, derandomize=True)
@given(CASES, st.sampled_from([1, 1, 2]))
def test_no_peak_of_any_case_is_above_its_cap(case: Case, ranks: int) -> None:
    check(case, ranks)
