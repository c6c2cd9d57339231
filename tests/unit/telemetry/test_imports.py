"""Services load no package for terminals."""

import subprocess
import sys

import pytest

from leyden.libs.telemetry.imports import without_rich


def test_logs_and_the_http_client_do_without_rich():
    program = """
import sys
from leyden.libs.telemetry.imports import without_rich
with without_rich():
    import leyden.libs.telemetry, httpx
print(sorted({name.partition(".")[0] for name in sys.modules} & {"rich", "pygments"}))
import rich.console
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]"]


def test_a_package_that_is_loaded_stays():
    rich = pytest.importorskip("rich")
    with without_rich():
        import rich as again
    assert again is rich is sys.modules["rich"]
