"""Agents that do what no agent should: the function named by the first argument runs in the attempt's working folder.

CANARY names a folder that is not theirs, BOUND the processes that their user may have, 0 for no bound.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time

REWARD_LINE = '{"reward": 1}'


def hang():
    time.sleep(600)


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def ignore_the_cpu_limit():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while True:
        pass


def fork_away():
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang()
    print(REWARD_LINE)


def fork_bomb():
    children = 0
    while children < int(os.environ["BOUND"] or 64):
        try:
            pid = os.fork()
        except BlockingIOError:
            break
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                try:
                    os.fork() if int(os.environ["BOUND"]) else time.sleep(600)
                except BlockingIOError:
                    time.sleep(0.1)
        children += 1
    print(REWARD_LINE)


def flood():
    block = b"x" * (1 << 20)
    for _ in range(512):
        os.write(1, block)
        os.write(2, block)
    with open(f"/proc/{os.getppid()}/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print("\n" + json.dumps({"reward": 1, "supervisor_peak_kib": peak}))


def fill_the_disk():
    with open("big", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))


def leave_many_files():
    for number in range(20_000):
        os.close(os.open(str(number), os.O_CREAT))
    print(REWARD_LINE)


def leave_a_deep_tree():
    for _ in range(3000):
        os.mkdir("deeper")
        os.chdir("deeper")
    print(REWARD_LINE)


def leave_what_is_read_only():
    os.makedirs("a/b/c")
    for folder in ("a/b/c", "a/b", "a", "."):
        open(folder + "/file", "w").close()
        os.chmod(folder + "/file", 0o400)
        os.chmod(folder, 0o500)
    print(REWARD_LINE)


def leave_strange_files():
    shutil.copy("/bin/sh", "sh")
    os.chmod("sh", 0o6755)
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    open(b"\xff\xfe \n", "w").close()
    os.symlink("circle", "circle")
    print(REWARD_LINE)


def leave_links():
    """In the places in which a clean-up would follow them: instead of folders, and of the working folder itself."""
    canary = os.environ["CANARY"]
    os.symlink(canary, "link")
    os.symlink(canary, "../tmp/link")
    shutil.rmtree("../tmp", ignore_errors=True)
    for attack in (
        lambda: os.symlink(canary, "../tmp"),
        lambda: os.rename("../work", "../gone"),
        lambda: os.symlink(canary, "../work"),
        lambda: os.rename("..", "../../elsewhere"),
        lambda: os.symlink(canary, "../../elsewhere"),
    ):
        try:
            attack()
        except OSError:
            continue
    print(REWARD_LINE)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_parents():
    """The supervisor and the runner."""
    with open(f"/proc/{os.getppid()}/stat") as stat:
        runner = int(stat.read().rpartition(")")[2].split()[1])
    killed = []
    for pid in (runner, os.getppid()):
        for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            try:
                os.kill(pid, number)
            except PermissionError:
                continue
            killed.append(int(number))
    print(json.dumps({"reward": float(not killed), "killed": killed}))


def close_its_output():
    os.close(1)
    os.close(2)
    time.sleep(0.2)
    os._exit(0)


def leave_without_a_reward():
    os._exit(0)


def crash():
    print(REWARD_LINE, flush=True)
    os.abort()


def print_a_broken_reward():
    print(REWARD_LINE)
    print('{"reward": 1')


def print_a_reward_that_is_not_finite():
    print('{"reward": NaN}')


def print_a_huge_reward():
    print('{"reward": 1' + "0" * 5000 + "}")


def print_a_deep_reward():
    print('{"reward": ' + "[" * 100_000 + "]" * 100_000 + "}")


def print_deep_facts():
    print('{"reward": 1, "deep": ' + "[" * 900 + "]" * 900 + "}")


def print_several_rewards():
    print('{"reward": 0.25}')
    print('{"reward": 0.75}')


def print_bytes_that_are_no_text():
    os.write(1, b'\xff\x00\xfe\n{"reward": 1, "nul": "\\u0000", "half": "\\ud800", "nan": NaN}\n')


globals()[sys.argv[1]]()
