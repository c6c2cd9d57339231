import subprocess
import sys

RETAINS = """
from pathlib import Path
from leyden.services.trainer.model.cpu.memory import retain_freed_memory

def resident_kilobytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

retain_freed_memory()
before = resident_kilobytes()
block = b"x" * 200_000_000
del block
print(resident_kilobytes() - before)
"""


def test_freed_memory_stays_with_the_process() -> None:
    printed = subprocess.run([sys.executable, "-c", RETAINS], check=True, capture_output=True, text=True).stdout
    assert int(printed) * 1024 >= 199_000_000
