"""The network guide documents every setting."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from turbopump.net.limits import ConnectionLimits
from turbopump.net.pool_config import PoolConfig
from turbopump.net.server import ServerConfig

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "network.md"


def test_every_setting_is_in_the_guide() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for config in (ConnectionLimits, ServerConfig, PoolConfig):
        for field in fields(config):
            assert f"`{field.name}`" in guide, f"{config.__name__}.{field.name} is not documented"
