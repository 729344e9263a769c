"""`zinf inspect`: prints what is in a checkpoint that `zinf_compile.save` has made."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from tabulate import tabulate

from zinf_compile.checkpoint.manifest import MANIFEST, saved_name, saves_in
from zinf_compile.checkpoint.plain_values import decode, readable
from zinf_compile.checkpoint.saved_files import Saved, SavedFiles
from zinf_compile.checkpoint.saved_tensors import VERSION
from zinf_compile.checkpoint.verify import verify
from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of

from .colors import colored

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SMALL_STATE = re.compile(r"(optimizer(?:\.\d+)?\.state)\..+\.([^.]+)")
"""A state that is a number, such as a step count; each parameter has one."""
_KNOWN = frozenset({"aliases", "optimizers", "extra"})


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "inspect",
        help="print what is in a checkpoint",
        description="Print what is in a checkpoint that zinf_compile.save has made: the newest of a folder, or the one that it "
        "is. Tensors whose names differ by numbers alone are one row. No value is read, unless it is verified.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where zinf_compile.save has written")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare the checksums")
    parser.add_argument("--json", action="store_true", help="for programs; keys: see zinf_compile/cli/inspect_checkpoint.py")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the command's output; raise `CheckpointError` for what is no checkpoint, or damaged."""
    with contextlib.closing(SavedFiles(options.folder)) as files:
        found = examine(files)
        if options.verify:
            done, problems = verify(files)
            if problems:
                count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
                raise CheckpointError("\n  ".join([f"{files.folder} is damaged ({count}):", *problems]))
            found["verified"] = done
            found["unverified"] = [] if files.has_own_checksum else [MANIFEST]
        older = [saved_name(number) for number in saves_in(files.folder.parent) if saved_name(number) != files.folder.name]
    return json.dumps(found, indent=2) if options.json else colored("\n".join(_lines(found, older)))


def examine(files: SavedFiles) -> dict[str, Any]:
    """Return what is in a checkpoint.

    Keys are added in later versions, never renamed. All sizes are in bytes.

        folder       of the checkpoint
        version      of the format
        ranks        that have written it
        parameters   tensors of the model: their number, elements and bytes; tied ones counted once
        tensors      by name (those of the model begin with "model."): shape, dtype, bytes, parts (rectangles in files)
        aliases      further names of tied tensors: the name under which each is saved
        optimizers   of each: class, groups (params: names; settings), states (by parameter those of a number)
        extra        what the user saved beside; a tensor is shown as its shape and type
        settings     whatever else was saved
        files        by name, bytes
        verified     with --verify: bytes of values that were read
        unverified   with --verify: files without a checksum, which can't be checked
    """
    stand_ins = {key: _described(tensor) for key, tensor in files.tensors.items()}
    settings = files.settings
    sizes = {path.name: path.stat().st_size for path in sorted(files.folder.iterdir()) if path.is_file()}
    tensors = {
        key: {"shape": list(t.shape), "dtype": _name(t.dtype), "bytes": _bytes(t), "parts": len(t.parts)}
        for key, t in sorted(files.tensors.items(), key=lambda item: _natural(item[0]))
    }
    model = [t for key, t in files.tensors.items() if key.startswith("model.")]

    def plain(value: Any, where: str) -> Any:
        return _plain(decode(value, where, stand_ins))  # type: ignore[arg-type]  # decode passes them on

    return {
        "folder": str(files.folder),
        "version": VERSION,
        "ranks": files.ranks,
        "parameters": {"count": len(model), "elements": sum(map(_numel, model)), "bytes": sum(map(_bytes, model))},
        "tensors": tensors,
        "aliases": settings.get("aliases", {}),
        "optimizers": {
            name: {
                "class": optimizer["class"],
                "groups": [
                    {"params": group["params"], "settings": plain(group["settings"], f"{name}.group.{number}")}
                    for number, group in enumerate(optimizer["groups"])
                ],
                "states": {key: plain(value, f"{name}.state.{key}") for key, value in optimizer["states"].items()},
            }
            for name, optimizer in settings.get("optimizers", {}).items()
        },
        "extra": plain(settings["extra"], "extra") if "extra" in settings else {},
        "settings": {name: value for name, value in settings.items() if name not in _KNOWN},
        "files": sizes,
    }


def _lines(found: Mapping[str, Any], older: list[str]) -> list[str]:
    tensors: dict[str, dict[str, Any]] = found["tensors"]
    count, total = len(found["files"]), sum(found["files"].values())
    facts = [
        ("checkpoint", found["folder"] + (f" (beside {', '.join(older)})" if older else "")),
        ("format", f"version {found['version']}"),
        ("written by", "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"),
        ("model", "{count:,} tensors, {elements:,} elements, {bytes:,} bytes".format(**found["parameters"])),
        ("files", f"{count:,}, {total:,} bytes"),
    ]
    if "verified" in found:
        facts.append(("verified", f"{found['verified']:,} bytes read, all checksums match"))
        facts += [("not verified", f"{name}: an earlier version has saved it without a checksum") for name in found["unverified"]]
    lines = [tabulate(facts, tablefmt="plain", disable_numparse=True)]
    headers = ["tensor", "count", "shape", "type", "bytes"]
    lines += ["", "# tensors", tabulate(_rows(tensors), headers, intfmt=",")]
    if found["aliases"]:
        lines += ["", "# tied", *(f"{alias} is {name}" for alias, name in found["aliases"].items())]
    for name, optimizer in found["optimizers"].items():
        lines += ["", f"# {name}: {optimizer['class']}"]
        for number, group in enumerate(optimizer["groups"]):
            settings = ", ".join(f"{key}={value}" for key, value in group["settings"].items())
            lines.append(f"group {number}: {len(group['params']):,} parameters; {settings}")
        small: dict[str, int] = {}
        for states in optimizer["states"].values():
            for key, value in states.items():
                small[f"{key}: {value}"] = small.get(f"{key}: {value}", 0) + 1
        lines += [f"{text}, of {of:,} parameters" for text, of in small.items()]
    if found["extra"]:
        lines += ["", "# extra", *(f"{key}: {json.dumps(value)}" for key, value in found["extra"].items())]
    if found["settings"]:
        lines += ["", "# other", *(f"{key}: {json.dumps(value)[:200]}" for key, value in found["settings"].items())]
    lines += ["", "# files", tabulate(list(found["files"].items()), ["file", "bytes"], intfmt=",")]
    return lines


def _rows(tensors: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for all tensors whose names differ by numbers alone and which are of one shape and type."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for key, tensor in tensors.items():
        small = None if tensor["shape"] else _SMALL_STATE.fullmatch(key)
        pattern = f"{small[1]}.*.{small[2]}" if small else _NUMBER.sub("*", key)
        alike.setdefault((pattern, str(tensor["shape"]), tensor["dtype"]), []).append(key)
    rows = []
    for (pattern, shape, dtype), keys in alike.items():
        size = sum(tensors[key]["bytes"] for key in keys)
        rows.append([pattern if len(keys) > 1 else keys[0], len(keys), shape, dtype, size])
    return rows


def _natural(key: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts names by the numbers in them."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in key.split("."))


def _plain(value: Any) -> Any:
    """Return a decoded value as JSON shows it."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, dict):
        return {readable(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return readable(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _described(tensor: Saved) -> str:
    return f"tensor {list(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numel(tensor: Saved) -> int:
    return math.prod(tensor.shape)


def _bytes(tensor: Saved) -> int:
    return format_of(tensor.dtype).bytes(_numel(tensor))
