"""Refuse io_uring, as the profiles of containers do."""

import ctypes
import struct

SETUP, ENTER = 425, 426
"""The numbers of io_uring_setup and io_uring_enter, the same on every architecture."""


def make_io_uring_fail_in_this_thread(code: int, call: int = SETUP) -> None:
    """Install a seccomp filter, as containers do: a call fails with `code` until this thread ends, and in those it starts."""
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    fail, allow = 0x00050000, 0x7FFF0000
    instruction = struct.Struct("=HBBI")
    program = ctypes.create_string_buffer(
        instruction.pack(load, 0, 0, 0)
        + instruction.pack(jump_if_equal, 0, 1, call)
        + instruction.pack(give_back, 0, 0, fail | code)
        + instruction.pack(give_back, 0, 0, allow)
    )
    header = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(program)))

    set_no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    for option, first, second in [(set_no_new_privs, 1, 0), (set_seccomp, filter_mode, ctypes.addressof(header))]:
        arguments = [ctypes.c_ulong(argument) for argument in (first, second, 0, 0)]
        assert ctypes.CDLL(None).prctl(option, *arguments) == 0, "this kernel refused a seccomp filter"
