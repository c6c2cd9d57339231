from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.shared import ROOT

WRITER = """
import sys
from pathlib import Path
from tests.support.shared import open_to_agents
open_to_agents(Path(sys.argv[1])).write_text("received")
"""


def test_the_agents_log_is_written_to_the_requested_file(tmp_path: Path) -> None:
    log = tmp_path / "received.log"
    subprocess.run([sys.executable, "-c", WRITER, str(log)], cwd=ROOT, check=True, timeout=60)
    assert (log.is_symlink(), log.read_text()) == (False, "received")
