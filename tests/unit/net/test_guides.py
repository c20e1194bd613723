"""The guides' programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from turbopump.net.limits import ConnectionLimits
from turbopump.net.pool import PoolConfig
from turbopump.net.server import ServerConfig

GUIDES = Path(__file__).parents[3] / "docs" / "guide"
PROGRAMS = [
    pytest.param(program, id=f"{name}-{number}")
    for name in ("network", "virtual-time")
    for number, program in enumerate(
        re.findall(r"```python\n(.*?)```", (GUIDES / f"{name}.md").read_text(), re.DOTALL)
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_the_guides_run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_setting_is_in_the_guide() -> None:
    guide = (GUIDES / "network.md").read_text()
    for config in (ConnectionLimits, ServerConfig, PoolConfig):
        for field in fields(config):
            assert f"`{field.name}`" in guide, f"{config.__name__}.{field.name} is not documented"
