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


def doors_into_the_kernel():
    """Numbers of x86-64 and of arm64."""
    arm = os.uname().machine == "aarch64"
    clone, unshare, setns, new_user = (220, 97, 268, 0x10000000) if arm else (56, 272, 308, 0x10000000)
    params = ctypes.create_string_buffer(248)
    attempt("io_uring", lambda: libc.syscall(425, 4, params) >= 0)
    attempt("io_uring_enter", lambda: libc.syscall(426, -1, 0, 0, 0, None, 0) >= 0 or ctypes.get_errno() != 38)
    attempt("a user namespace", lambda: in_a_child(lambda: libc.syscall(unshare, new_user) == 0))
    attempt("one with others", lambda: in_a_child(lambda: libc.syscall(unshare, new_user | 0x20000) == 0))
    attempt("setns", lambda: libc.syscall(setns, os.open("/proc/self/ns/user", os.O_RDONLY), 0) == 0)
    attempt("a clone in a user namespace", lambda: cloned(libc.syscall(clone, new_user | signal.SIGCHLD, 0, 0, 0, 0)))
    attempt("clone3", lambda: libc.syscall(435, None, 0) == 0 or ctypes.get_errno() != 38)
    attempt("uid_map", lambda: in_a_child(lambda: open("/proc/self/uid_map", "w").write("0 0 1") > 0))


def in_a_child(theft):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(42 if theft() else 0)
        except OSError:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def cloned(pid):
    if pid == 0:
        os._exit(0)
    return pid > 0


def a_better_place_when_memory_is_short():
    attempt("a worse score than ours", lambda: int(open("/proc/self/oom_score_adj").read()) != 1000)
    for value in ("999", "0", "-1000"):
        for path in (
            "/proc/self/oom_score_adj",
            "/proc/thread-self/oom_score_adj",
            f"/proc/{os.getppid()}/oom_score_adj",
        ):
            attempt("a lower oom_score_adj", lambda path=path, value=value: open(path, "w").write(value) > 0)


its_own_process()
doors_into_the_kernel()
a_better_place_when_memory_is_short()
files()
processes()
ports()
print(json.dumps({"reward": float(bool(got)), "got": sorted(set(got))}))
