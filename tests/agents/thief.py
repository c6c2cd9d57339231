"""An agent that tries to reach the files and processes of others, and reports its loot as `got`.

PREY says where to look. `folders`: of the platform and of another attempt; `pids`: of processes that hold secrets;
`word`: the secret itself; `postgres`, `redis`: ports; `abstract`: the name of an abstract socket; `signals`: whether
signals are confined; `own`: whether this agent has a user of its own; `code`: a file of the platform's code.
"""

import ctypes
import glob
import json
import os
import signal
import socket
import struct

PREY = json.loads(os.environ["PREY"])
WORD = PREY["word"].encode()
libc = ctypes.CDLL(None, use_errno=True)
got = []


def attempt(what, theft):
    """Notes a theft that works: one that gives something true."""
    try:
        if theft():
            got.append(what)
    except (OSError, ValueError):
        pass


def holds_the_word(path):
    with open(path, "rb") as file:
        return WORD in file.read(1 << 20)


def files():
    for folder in PREY["folders"]:
        for here, _, names in os.walk(folder):
            for name in names:
                attempt(f"file {name}", lambda path=f"{here}/{name}": holds_the_word(path))
        attempt("writing", lambda folder=folder: open(folder + "/left", "w"))
        attempt("removing", lambda folder=folder: [os.unlink(path) for path in glob.glob(folder + "/*")])
        attempt("linking", lambda folder=folder: [os.link(path, "linked") for path in glob.glob(folder + "/*/*")])


def processes():
    for pid in (*PREY["pids"], os.getppid()):
        one_process(pid, f"/proc/{pid}")


def one_process(pid, proc):
    for name in ("environ", "mem", "auxv", "syscall", "stack"):
        attempt(f"/proc {name}", lambda path=f"{proc}/{name}": open(path, "rb").read(1) or True)
    for name in ("cwd", "root", "exe"):
        attempt(f"/proc {name}", lambda path=f"{proc}/{name}": os.readlink(path))
    attempt("/proc root", lambda: os.listdir(f"{proc}/root/"))
    for number in range(32):
        attempt("what a descriptor is", lambda path=f"{proc}/fd/{number}": os.readlink(path))
        attempt("a descriptor", lambda path=f"{proc}/fd/{number}": open(path, "rb"))
    attempt("ptrace", lambda: libc.ptrace(16, pid, 0, 0) == 0)
    attempt("its memory", lambda: process_vm_readv(pid) > 0)
    attempt("pidfd_getfd", lambda: libc.syscall(438, os.pidfd_open(pid), 1, 0) >= 0)
    if PREY["signals"]:
        attempt("a signal", lambda: os.kill(pid, signal.SIGCONT) or True)


def process_vm_readv(pid):
    buffer = ctypes.create_string_buffer(16)
    with open("/proc/self/maps") as maps:
        address = int(maps.readline().split("-")[0], 16)
    ours = struct.pack("QQ", ctypes.addressof(buffer), 16)
    return libc.process_vm_readv(pid, ours, 1, struct.pack("QQ", address, 16), 1, 0)


def ports():
    attempt("postgres", lambda: ask(PREY["postgres"], postgres_hello())[:9] == b"R\0\0\0\x08\0\0\0\0")
    attempt("redis", lambda: ask(PREY["redis"], b"PING\r\n").startswith(b"+"))
    if PREY["signals"]:
        attempt("an abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\0" + PREY["abstract"]) is None)


def ask(port, question):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(question)
        return connection.recv(100)


def postgres_hello():
    words = struct.pack("!I", 196608) + b"user\0leyden\0database\0leyden\0\0"
    return struct.pack("!I", len(words) + 4) + words


def its_own_process():
    attempt("a descriptor of the platform", lambda: sorted(os.listdir("/proc/self/fd")) != ["0", "1", "2", "3"])
    attempt("a variable of the platform", lambda: "PLATFORM_SECRET" in os.environ)
    if os.getuid() != 0:
        attempt("root", lambda: os.setuid(0) or True)
    attempt("a file that only root may read", lambda: PREY["own"] and open("/etc/shadow"))
    for path in (PREY["code"], "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname"):
        attempt(f"writing {path}", lambda path=path: open(path, "r+"))
    attempt("a mount", lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0)
    attempt("an unmount", lambda: libc.umount2(PREY["folders"][0].encode(), 2) == 0)
    attempt("open umask", lambda: os.umask(0o077) != 0o077)
    with open("/proc/self/status") as status:
        facts = {name: value.strip() for name, _, value in (line.partition(":") for line in status)}
    attempt("capabilities", lambda: int(facts["CapEff"], 16) | int(facts["CapPrm"], 16) | int(facts["CapAmb"], 16))
    attempt("new privileges", lambda: facts["NoNewPrivs"] != "1")
    attempt("groups", lambda: set(facts["Groups"].split()) - set(facts["Gid"].split()) and PREY["own"])


its_own_process()
files()
processes()
ports()
print(json.dumps({"reward": float(bool(got)), "got": sorted(set(got))}))
