"""`zinf bench-io` on a small file: the shape of what it says, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zinf_compile.cli import bench_io
from zinf_compile.cli.main import main
from zinf_compile.runtime.storage.scratch_file import ScratchFile

SMALL = ["--size", "4MiB", "--burst", "1MiB", "--seconds", "0.2", "--block", "64KiB", "1MiB", "--depth", "1", "4"]


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str) -> None:
    assert main(["bench-io", str(tmp_path), *SMALL, "--engine", engine, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"filesystem", "engine", "burst", "sustained"}
    assert set(found["filesystem"]) == {"kind", "source", "mount_point", "direct", "alignment", "concern", "free"}
    assert found["engine"]["name"] == engine or engine == "auto"
    settings = [(case["mode"], case["block"], case["depth"]) for case in found["burst"]]
    assert settings == [(m, b, d) for m in ("write", "read", "both") for b in (1 << 16, 1 << 20) for d in (1, 4)]
    assert [case["mode"] for case in found["sustained"]] == ["write", "read", "both"]
    for case in found["burst"] + found["sustained"]:
        assert set(case) == {"mode", "block", "depth", "bytes_per_s"}
        assert case["bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []


def test_the_table_has_a_row_per_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench-io", str(tmp_path), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "engine: " in printed
    assert printed.count("\nburst") == 12
    assert printed.count("\nsustained") == 3


@pytest.mark.parametrize("mode", ["write", "read", "both"])
def test_each_transfer_stays_within_the_file(tmp_path: Path, mode: str) -> None:
    scratch = ScratchFile(str(tmp_path))
    case = bench_io.Case(scratch.file, 16 * 4096, mode, 4096, 4, engine="auto")
    places = [case.request(number) for number in range(64)]
    scratch.close()
    assert {offset for _, offset in places} == {4096 * number for number in range(16)}
    if mode == "both":
        assert {offset >= 8 * 4096 for write, offset in places if write} == {True}
        assert {offset >= 8 * 4096 for write, offset in places if not write} == {False}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "lots"], "'lots' is not a size"),
        (["--size", "0"], "'0' is not a size"),
        (["--block", "-5"], "'-5' is not a size"),
        (["--depth", "0"], "'0' is not a number of blocks; accepted: 1 to 9,999,999"),
        (["--depth", "²"], "'²' is not a number of blocks; accepted: 1 to 9,999,999"),
        (["--seconds", "never"], "'never' is not a number of seconds"),
        (["--seconds", "0"], "'0' is not a number of seconds; accepted: more than 0, such as 0.5 or 10"),
        (["--engine", "aio"], "invalid choice: 'aio'"),
    ],
)
def test_arguments_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench-io", str(tmp_path), *arguments])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "1000TB"], "bytes needed"),
        (["--size", "1MiB"], "less than two blocks of 4,194,304 bytes"),
        (
            ["--size", "8MiB", "--depth", "3"],
            "--depth 3 blocks of 4,194,304 bytes at a time are more than --size, 8,388,608 bytes",
        ),
        (["--size", "1MiB", "--block", "1000"], "accepted: multiples of 4096"),
    ],
)
def test_sizes_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str) -> None:
    assert main(["bench-io", str(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench-io", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
