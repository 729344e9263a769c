"""Programs that tests fork: as whole as those of a new interpreter."""

from __future__ import annotations

from programs import Program, run_program


def test_arguments_output_and_what_happens_at_the_end() -> None:
    said = run_program(
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print(__name__, sys.argv)",
        "a",
        "b",
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, "__main__ ['-c', 'a', 'b']\nthread\nlast\n", "")


def test_errors_and_signals_are_its_exit_code() -> None:
    failed = run_program("raise KeyError('x')")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "KeyError: 'x'")
    assert run_program("import os; os.kill(os.getpid(), 9)").returncode == -9


def test_it_reads_what_is_written_to_it_and_is_killed_at_the_end() -> None:
    with Program("print(input(), flush=True); input()") as program:
        program.stdin.write("said\n")
        program.stdin.flush()
        assert program.stdout.readline() == "said\n"
    assert program.process.exitcode == -9
