"""`zinf consolidate`: writes the model of a checkpoint as one set of files that transformers loads."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from tabulate import tabulate

from zinf_compile.checkpoint.consolidate import consolidate
from zinf_compile.checkpoint.saved_files import SavedFiles
from zinf_compile.errors import CheckpointError

from .colors import colored


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "consolidate",
        help="write a checkpoint's model as files that transformers loads",
        description="Write the model of a checkpoint that zinf_compile.save has made as safetensors in the layout of "
        "transformers, a few pieces in memory at a time. Configurations and tokenizers are copied where they lie beside it.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where zinf_compile.save has written")
    parser.add_argument("out", metavar="OUT", help="the folder to write to; made where it is missing")
    parser.add_argument("--file-bytes", metavar="SIZE", default="4GiB", help="the most bytes of a file (default 4GiB)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Write the files; return a table of them. Raises `CheckpointError`."""
    try:
        with contextlib.closing(SavedFiles(options.folder)) as files:
            written = consolidate(files, options.out, file_bytes=options.file_bytes)
            source = files.folder
    except OSError as error:
        raise CheckpointError(str(error)) from error
    rows = [(name, (Path(options.out) / name).stat().st_size) for name in written]
    return colored("\n".join([f"# {source} in {options.out}", tabulate(rows, ["file", "bytes"], intfmt=",")]))
