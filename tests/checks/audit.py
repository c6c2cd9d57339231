"""Two audits before a release: pinned packages with published vulnerabilities, and secrets in tracked files.

`python -m tests.checks.audit packages` asks PyPI's advisories for every version in constraints.txt. A vulnerability
fails with exit status 1, and an audit of nothing (no network, a mirror without advisories) with 2; a single package
without advisories is named.
`python -m tests.checks.audit secrets` fails on anything that looks like a secret and is not in `.secrets.baseline`;
`--accept` writes into the baseline what is there now, after somebody has looked at each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOT_AUDITED = 2
BASELINE = ROOT / ".secrets.baseline"
NO_SECRETS_IN = r"(^|/)(constraints\.txt|package-lock\.json)$|^\.secrets\.baseline$"
"""Versions and hashes: random to look at, and public."""

Finding = tuple[str, str, str]
"""File, kind, and the SHA-1 of what looks like a secret."""


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One of the tools of this environment, run in the root of the tree."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def packages() -> int:
    """Exit status: 1 with vulnerabilities, NOT_AUDITED where no package was audited."""
    ran = tool(
        "pip-audit", "--requirement=constraints.txt", "--no-deps", "--disable-pip", "--format=json",
        "--progress-spinner=off",
    )  # fmt: skip
    try:
        found: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
    except ValueError:
        print(f"packages: NOT AUDITED, pip-audit could not ask: {(ran.stderr.strip().splitlines() or ['?'])[-1]}")
        return NOT_AUDITED
    asked = [one for one in found if "vulns" in one]
    skipped = [one["name"] for one in found if "vulns" not in one]
    broken = [(one, problem) for one in asked for problem in one["vulns"]]
    for one, problem in broken:
        fixed = ", ".join(problem["fix_versions"]) or "no version yet"
        print(f"packages: {one['name']} {one['version']} has {problem['id']}; fixed in {fixed}")
    print(f"packages: {len(asked)} audited, {len(broken)} vulnerabilities, {len(skipped)} could not be audited", end="")
    print(f" (no advisories for them here: {', '.join(skipped[:5])} …)" if skipped else "")
    if not asked:
        print("packages: NOT AUDITED: no package has advisories here; ask an index that has them")
        return NOT_AUDITED
    return 1 if broken else 0


def findings() -> dict[Finding, int]:
    """What looks like a secret in tracked files, with its line."""
    ran = tool("detect-secrets", "scan", "--no-verify", "--exclude-files", NO_SECRETS_IN)
    ran.check_returncode()
    results: dict[str, list[dict[str, Any]]] = json.loads(ran.stdout)["results"]
    return {
        (file, one["type"], one["hashed_secret"]): one["line_number"] for file, ones in results.items() for one in ones
    }


def secrets(*, accept: bool) -> int:
    """Exit status: 1 with findings that nobody accepted."""
    found = findings()
    if accept:
        BASELINE.write_text(json.dumps(sorted(found), indent=1) + "\n")
        print(f"secrets: {len(found)} accepted as harmless in {BASELINE.name}")
        return 0
    accepted = {(file, kind, digest) for file, kind, digest in json.loads(BASELINE.read_text())}
    new = sorted(set(found) - accepted)
    for finding in new:
        print(f"secrets: {finding[0]}:{found[finding]} looks like a secret ({finding[1]})")
    if new:
        print(
            "secrets: take them out, and revoke them; or, if harmless, `python -m tests.checks.audit secrets --accept`"
        )
    return 1 if new else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the look that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    looks = parser.add_subparsers(dest="look", required=True)
    looks.add_parser("packages")
    looks.add_parser("secrets").add_argument("--accept", action="store_true")
    asked = parser.parse_args(arguments)
    return packages() if asked.look == "packages" else secrets(accept=asked.accept)


if __name__ == "__main__":
    sys.exit(main())
