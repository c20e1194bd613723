"""Settings from files and options together."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbopump.cli.options import file_settings, given, settings_of
from turbopump.errors import InvalidArgument

SETTINGS = {"a": "1", "nameserver.b": "2", "broker.c": "3"}


def test_a_section_has_its_own_and_the_top_level_settings() -> None:
    assert settings_of("nameserver", SETTINGS) == {"a": "1", "b": "2"}
    assert settings_of("broker", SETTINGS) == {"a": "1", "c": "3"}
    assert settings_of("nameserver", SETTINGS, has_plain=False) == {"b": "2"}


def test_a_top_level_setting_wins_because_remote_changes_are_saved_there() -> None:
    settings = {"a": "new", "nameserver.a": "old"}
    assert settings_of("nameserver", settings) == {"a": "new"}
    assert settings_of("nameserver", dict(reversed(settings.items()))) == {"a": "new"}


@pytest.mark.parametrize("key", ["namserver.a", "nameserver.tls.a", ".a"])
def test_section_that_does_not_exist_is_named(key: str) -> None:
    with pytest.raises(InvalidArgument, match="must be nameserver or broker"):
        settings_of("nameserver", {key: "1"})


def test_no_file_has_no_settings(tmp_path: Path) -> None:
    assert file_settings(None) == {}
    with pytest.raises(InvalidArgument, match="missing"):
        file_settings(tmp_path / "missing")


def test_only_given_options_count() -> None:
    assert given(port=0, host=None, name="x") == {"port": "0", "name": "x"}
