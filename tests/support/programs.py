"""Python programs in processes of their own: with arguments, standard streams, and the end of an interpreter.

They are forked from a process that has imported the libraries. What is about imports, the memory of a new process or the way
in which Python is called needs `subprocess`.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

import torch.multiprocessing as mp
from forking import end_as_a_program, start_forked

TIMEOUT_S = 120


class Program:
    """A program that runs, with pipes for its input and output; killed at the end of a `with`."""

    def __init__(self, source: str, *arguments: str) -> None:
        (theirs, stdin), (stdout, out), (stderr, err) = (mp.Pipe(duplex=False) for _ in range(3))
        self.process = start_forked(_main, source, arguments, dict(os.environ), theirs, out, err)
        for connection in (theirs, out, err):
            connection.close()
        self.stdin = os.fdopen(os.dup(stdin.fileno()), "w")
        self.stdout, self.stderr = (os.fdopen(os.dup(connection.fileno())) for connection in (stdout, stderr))
        for connection in (stdin, stdout, stderr):
            connection.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


def run_program(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does."""
    with Program(source, *arguments) as program:
        said = ["", ""]

        def read(number: int, stream: io.TextIOBase) -> None:
            said[number] = stream.read()

        threads = [threading.Thread(target=read, args=each) for each in enumerate((program.stdout, program.stderr))]
        for thread in threads:
            thread.start()
        program.process.join(TIMEOUT_S)
        code = program.process.exitcode
        program.process.kill()  # where it hangs
        for thread in threads:
            thread.join()
    assert code is not None, f"the program still ran after {TIMEOUT_S} s; it said {said}"
    return subprocess.CompletedProcess(["-c", *arguments], code, *said)


def _main(source: str, arguments: Sequence[str], environment: Mapping[str, str], *streams: Connection) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    for number, connection in enumerate(streams):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, "<string>", "exec"), vars(sys.modules["__main__"]))
    except BaseException as error:
        end_as_a_program(error)
    end_as_a_program()
