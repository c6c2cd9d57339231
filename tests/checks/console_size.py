"""Checks that the built console stays small: `python -m tests.checks.console_size`."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

STATIC = Path(__file__).resolve().parents[2] / "services" / "api" / "static"
MAX_BYTES = 120 * 1024


def main() -> int:
    """Prints the size of all files as a browser receives them; exit status 1 above the limit."""
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    size = sum(len(gzip.compress(path.read_bytes())) for path in files)
    print(f"console: {size / 1024:.1f} KiB gzip in {len(files)} files, at most {MAX_BYTES / 1024:.0f} are allowed")
    return 0 if files and size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
