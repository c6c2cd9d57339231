"""The console writes out the same characters as the CLI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from leyden.libs.cli.view.safe_text import safe_line, safe_lines

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "services" / "api" / "console" / "src" / "safe_text.ts"
# Lone surrogates travel as escapes of JSON.
EVERY = "".join(map(chr, range(sys.maxunicode + 1)))
PROGRAM = f"""
import {{ readFileSync }} from "node:fs";
import {{ safeLine, safeText }} from {json.dumps(MODULE.as_uri())};
const {{ characters, text }} = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify([characters.map(safeLine), safeText(text)]));
"""


def test_every_character_is_shown_as_the_cli_shows_it() -> None:
    text = "a\r\nb\rc\n\td\x1b[2J\u202e"
    node = Path(sys.executable).with_name("node")
    sent = json.dumps({"characters": list(EVERY), "text": text})
    done = subprocess.run(
        [node, "--input-type=module", "--eval", PROGRAM], input=sent, capture_output=True, text=True, check=True
    )
    characters, lines = json.loads(done.stdout)
    assert [(ord(one), shown) for one, shown in zip(EVERY, characters, strict=True) if shown != safe_line(one)] == []
    assert lines.split("\n") == safe_lines(text)
