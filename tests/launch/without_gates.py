"""Runs a command as in a container that does not let processes duplicate their children's sockets (seccomp)."""

import ctypes
import os
import struct
import sys

_PIDFD_GETFD, _EPERM = 438, 1
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
#: The instructions of the kernel's filters: code, jumps if true and if false, operand.
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000

program = b"".join(
    struct.pack("HBBI", *each)
    for each in (
        (_LOAD_NUMBER, 0, 0, 0),
        (_IF_EQUAL, 0, 1, _PIDFD_GETFD),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
)
instructions = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
description = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
if libc.prctl(_SET_SECCOMP, _FILTER, description, 0, 0):
    raise OSError(ctypes.get_errno(), "this kernel has no filters of system calls")
os.execvp(sys.argv[1], sys.argv[1:])
