"""The seccomp filter of a program: no user namespaces and no io_uring, the two widest doors into a kernel, and perhaps
no sockets.

The supervisor's child loads it between `fork` and `exec`, with the standard library alone. A refused call fails as on a
kernel without the feature, so that programs with another way go that way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CLONE_NEWUSER = 0x10000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; flags lie in the lower half of an argument."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
X32_NUMBERS = 0x40000000
# The same numbers on every architecture.
IO_URING = (425, 426, 427)
CLONE3 = 435
"""Its flags lie in memory, where no filter can read them; glibc then calls `clone`."""

Instruction = tuple[int, int, int, int]

ARCHITECTURES: dict[str, tuple[tuple[int, tuple[int, int], int, tuple[int, ...]], ...]] = {
    "x86_64": ((0xC000003E, (56, 272), 308, (41,)), (0x40000003, (120, 310), 346, (102, 359))),
    "aarch64": ((0xC00000B7, (220, 97), 268, (198,)),),
}
"""By machine: each set of system calls that its kernel speaks, with the numbers of `clone` and `unshare`, of `setns`,
and of those that make sockets: `socket` and the older `socketcall`. `socketpair` reaches nobody else."""

_libc = ctypes.CDLL(None, use_errno=True)


def can_filter() -> bool:
    """Whether this kernel filters system calls, and this module knows the machine's numbers."""
    if os.uname().machine not in ARCHITECTURES:
        return False
    # Without a program the kernel answers EFAULT, and one without filters EINVAL.
    return bool(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None) == -1 and ctypes.get_errno() == errno.EFAULT)


def refuse_system_calls(*, network: bool) -> None:
    """Loads the filter for this process and everything that it starts; needs `no_new_privs`.

    Args: network: whether sockets stay open
    Raises: OSError: the kernel refuses
    """
    program = b"".join(
        struct.pack("=HBBI", *instruction) for instruction in _program(os.uname().machine, network=network)
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    if _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _program(machine: str, *, network: bool) -> list[Instruction]:
    """One section for each set of system calls; those of any other set are refused."""
    program: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE)]
    for architecture, flagged, setns, sockets in ARCHITECTURES[machine]:
        section = _section(flagged, setns, () if network else sockets)
        program += [(JUMP_EQUAL, 0, len(section), architecture), *section]
    return [*program, _refusal(errno.ENOSYS)]


def _section(flagged: tuple[int, int], setns: int, sockets: tuple[int, ...]) -> list[Instruction]:
    section: list[Instruction] = [(LOAD, 0, 0, NUMBER), (JUMP_AT_LEAST, 0, 1, X32_NUMBERS), _refusal(errno.ENOSYS)]
    for number in (*IO_URING, CLONE3):
        section += [(JUMP_EQUAL, 0, 1, number), _refusal(errno.ENOSYS)]
    section += [(JUMP_EQUAL, 0, 1, setns), _refusal(errno.EPERM)]
    for number in sockets:
        section += [(JUMP_EQUAL, 0, 1, number), _refusal(errno.EACCES)]
    clone, unshare = flagged
    return [
        *section,
        (JUMP_EQUAL, 1, 0, clone),
        (JUMP_EQUAL, 0, 3, unshare),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_BITS, 0, 1, CLONE_NEWUSER),
        _refusal(errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _refusal(number: int) -> Instruction:
    return RETURN, 0, 0, REFUSE | number
