"""Every setting is documented, with its default."""

from __future__ import annotations

import re
from pathlib import Path

from turbopump.nameserver import NameServerConfig
from turbopump.settings import keys_of

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "configuration.md"


def documented(section: str) -> dict[str, str]:
    """Return the keys of a section's table with what stands for their default."""
    text = GUIDE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    table = text.partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


def test_settings_of_the_name_server() -> None:
    keys = keys_of(NameServerConfig)
    told = documented("Name server")
    assert told.keys() == keys.keys()
    for key, default in keys.items():
        if default is not None:
            assert told[key] == f"`{default}`"
