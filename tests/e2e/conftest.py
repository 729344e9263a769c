"""The smoke tests: one of each thing that the README promises, which `make test-core` runs beside tests/unit."""

from __future__ import annotations

from pathlib import Path

import pytest

SMOKE = {
    "trains like eager": "test_training.py::test_training_is_bitwise_eager[lora]",
    "under autocast": "test_training.py::test_autocast_is_bitwise_aot_eager[tied]",
    "states on drives": "test_offloaded_states.py::test_every_optimizer[rmsprop]",
    "values on drives": "test_offloaded_values.py::test_values_are_eagers_and_what_is_written_in_place_is_kept[nvme]",
    "a cap on device memory": "test_inference.py::test_a_model_of_four_times_what_the_device_may_hold[frozen-host-fx]",
    "parameters in tiles": "test_tiling.py::test_other_uses_are_whole",
    "losses in chunks": "test_chunk_loss.py::test_autocast_and_half_precision_are_as_near_as_eager[fx]",
    "steps that end later": "test_deferred_step.py::test_every_optimizer[drive-rmsprop]",
    "models that fit nowhere": "test_from_meta.py::test_training_is_eagers[told twice-made_on_meta-tied-in place]",
    "saved without being whole": "test_save.py::test_a_plain_model_loads_it[1000]",
    "eager checkpoints": "test_optimizer_state.py::test_an_eager_run_goes_on_compiled[OddShapes-sgd_momentum]",
    "master copies": "test_master.py::test_master_copies[128-memory-3]",
    "zinf_compile.stats": "test_stats.py::test_stats_of_a_step",
    "zinf dump": "test_cli.py::test_json_says_what_moves",
}


CORE = "(unit or smoke) and not thorough"
"""What `make test-core` selects."""
_FILES = {name.partition("::")[0] for name in SMOKE.values()}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other files of this folder for `make test-core`, nor the libraries that they import."""
    others = config.getoption("markexpr") == CORE and collection_path.name.startswith("test_")
    return True if others and collection_path.name not in _FILES else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the smoke tests; where their file is collected whole, each is there."""
    found = {item.nodeid.rpartition("tests/e2e/")[2]: item for item in items if "tests/e2e/" in item.nodeid}
    files = {name.partition("::")[0] for name in found}
    for feature, name in SMOKE.items():
        if name in found:
            found[name].add_marker("smoke")
        elif name.partition("::")[0] in files and not any("::" in str(arg) for arg in items[0].config.args):
            raise pytest.UsageError(f"the smoke test of {feature!r}, {name}, is gone; name another in tests/e2e/conftest.py")
