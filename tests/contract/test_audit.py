"""`make audit` fails on vulnerable packages and on an audit of nothing, `make lint` on likely secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.checks import audit


def ran(stdout: str, stderr: str = "") -> Any:
    return lambda *_: subprocess.CompletedProcess([], 1, stdout, stderr)


def test_a_vulnerable_package_fails_and_one_without_advisories_is_named(monkeypatch, capsys):
    vulnerable = {"name": "urllib3", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.0"]}]}
    document = {"dependencies": [vulnerable, {"name": "torch", "skip_reason": "not found"}]}
    monkeypatch.setattr(audit, "tool", ran(json.dumps(document)))
    assert audit.main(["packages"]) == 1
    said = capsys.readouterr().out
    assert "urllib3 1.0 has PYSEC-1; fixed in 2.0" in said
    assert "1 audited, 1 vulnerabilities, 1 could not be audited (no advisories for them here: torch" in said


def test_the_audit_reports_a_missing_network(monkeypatch, capsys):
    monkeypatch.setattr(audit, "tool", ran("", "requests.exceptions.ConnectionError: no route"))
    assert audit.main(["packages"]) == audit.NOT_AUDITED
    assert "NOT AUDITED" in capsys.readouterr().out


def test_an_audit_of_nothing_fails(monkeypatch, capsys):
    document = {"dependencies": [{"name": "torch", "skip_reason": "not found"}]}
    monkeypatch.setattr(audit, "tool", ran(json.dumps(document)))
    assert audit.main(["packages"]) == audit.NOT_AUDITED
    assert "NOT AUDITED" in capsys.readouterr().out


def test_a_new_secret_fails_and_an_accepted_one_does_not(monkeypatch, capsys, tmp_path: Path):
    found = {("a.py", "Private Key", "5e1f"): 7}
    monkeypatch.setattr(audit, "BASELINE", tmp_path / "baseline")
    monkeypatch.setattr(audit, "findings", lambda: found)
    assert audit.main(["secrets", "--accept"]) == 0
    assert audit.main(["secrets"]) == 0
    found["b.py", "Private Key", "77aa"] = 3
    assert audit.main(["secrets"]) == 1
    assert "b.py:3 looks like a secret (Private Key)" in capsys.readouterr().out


def test_the_scanner_finds_a_real_key(tmp_path: Path):
    planted = tmp_path / "settings.py"
    # Put together here, so that this file holds none.
    planted.write_text('AWS_KEY = "' + "AKIA" + "IOSFODNN7" + 'EXAMPLX"\n')
    answer = audit.tool("detect-secrets", "-C", str(tmp_path), "scan", "--no-verify", "--all-files", ".")
    assert answer.returncode == 0
    assert [one["type"] for ones in json.loads(answer.stdout)["results"].values() for one in ones] == ["AWS Access Key"]
