"""Every setting of a client is documented with its default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from turbopump import (
    ClientConfig,
    FetchLimits,
    LitePullConfig,
    MessageRules,
    ProducerConfig,
    PullConfig,
    PullTimes,
)
from turbopump.wire.command import Command

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
KINDS: list[Any] = [
    ClientConfig,
    FetchLimits,
    LitePullConfig,
    MessageRules,
    ProducerConfig,
    PullConfig,
    PullTimes,
]
SETTINGS = [(kind.__name__, field) for kind in KINDS for field in fields(kind) if field.init]


@pytest.mark.parametrize(
    ("kind", "setting"), SETTINGS, ids=[f"{kind}.{field.name}" for kind, field in SETTINGS]
)
def test_settings_are_documented(kind: str, setting: Any) -> None:
    text = (GUIDE / "producer.md").read_text() + (GUIDE / "pulling.md").read_text()
    assert f"{setting.name}`" in text, f"{kind}.{setting.name}"
    if type(setting.default) is int:
        lines = [line for line in text.splitlines() if f"{setting.name}`" in line]
        assert any(str(setting.default) in line for line in lines), f"{kind}.{setting.name}"


@dataclass
class Signer:
    """A hook without a hash, equal to others with the same token."""

    token: str

    def before_request(self, address: str, command: Command) -> Command:
        return command

    def after_response(self, address: str, request: Command, response: Command) -> None: ...


def test_configurations_are_equal_if_they_have_the_same_hooks() -> None:
    one, other = Signer("secret"), Signer("secret")
    config = ClientConfig("ns:9876", request_hooks=[one])
    same = ClientConfig("ns:9876", request_hooks=[one])
    assert config == same
    assert hash(config) == hash(same)
    assert config != ClientConfig("ns:9876", request_hooks=[other])
    assert config != ClientConfig("ns:9876")
    assert config != ClientConfig("ns:9877", request_hooks=[one])
    assert config != "ns:9876"
