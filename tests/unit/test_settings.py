"""Settings from texts and files, and configurations built from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import InvalidArgument
from turbopump.settings import (
    changed_properties,
    configured,
    described,
    keys_of,
    parse_properties,
    parse_toml,
    read_settings,
    render_properties,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    host: str = setting("bindAddress", "127.0.0.1")
    queue_count: int = 8
    is_open: bool = True
    data_path: Path = field(default_factory=Path)
    backup_path: Path | None = None


def test_properties_skip_comments_and_blanks() -> None:
    text = "# a comment\n! another\n\n  key = some value \npath=a=b\nempty=\n"
    assert parse_properties(text) == {"key": "some value", "path": "a=b", "empty": ""}


@pytest.mark.parametrize("line", ["no mark here", "=value"])
def test_line_without_key_and_value_is_named(line: str) -> None:
    with pytest.raises(InvalidArgument, match="line 2 must be key=value"):
        parse_properties(f"a=1\n{line}")


texts = st.text(st.characters(codec="ascii", exclude_characters="=#!\n\r\x0b\x0c\x1c\x1d\x1e"))
keys = texts.map(str.strip).filter(bool)


@given(st.dictionaries(keys, texts.map(str.strip)))
def test_properties_are_read_as_they_were_written(settings: dict[str, str]) -> None:
    assert parse_properties(render_properties(settings)) == settings


def test_changing_keeps_comments_and_order() -> None:
    text = "# the port\nlistenPort=1\n\nname = a\n"
    changed = changed_properties(text, {"name": "b", "added": "c"})
    assert changed == "# the port\nlistenPort=1\n\nname=b\nadded=c\n"


def test_toml_is_flattened() -> None:
    text = 'plain = "a"\n[nameserver]\nlistenPort = 9876\norderMessageEnable = true\n'
    assert parse_toml(text) == {
        "plain": "a",
        "nameserver.listenPort": "9876",
        "nameserver.orderMessageEnable": "true",
    }


def test_toml_value_of_another_kind_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"a\.b must be .*got \[1\]"):
        parse_toml("a.b = [1]")


@pytest.mark.parametrize(("name", "text"), [("c.toml", "a = 1"), ("c.conf", "a=1"), ("c", "a=1")])
def test_form_of_a_file_follows_its_name(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_settings(path) == {"a": "1"}


@pytest.mark.parametrize(("name", "text"), [("c.toml", b"a ="), ("c.conf", b"a"), ("c", b"\xff")])
def test_unreadable_file_is_named(tmp_path: Path, name: str, text: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(InvalidArgument, match=name):
        read_settings(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nothing\.conf"):
        read_settings(tmp_path / "nothing.conf")


def test_configuration_from_settings_and_back() -> None:
    settings = {
        "bindAddress": "0.0.0.0",
        "queueCount": "4",
        "isOpen": "False",
        "dataPath": "/data",
        "backupPath": "/backup",
    }
    config = configured(Example, settings)
    assert config == Example(
        host="0.0.0.0",
        queue_count=4,
        is_open=False,
        data_path=Path("/data"),
        backup_path=Path("/backup"),
    )
    assert configured(Example, described(config)) == config


def test_settings_without_a_value_are_omitted() -> None:
    assert described(Example()).keys() == {"bindAddress", "queueCount", "isOpen", "dataPath"}
    assert keys_of(Example)["backupPath"] is None
    assert keys_of(Example)["isOpen"] == "true"


def test_home_is_found() -> None:
    assert configured(Example, {"dataPath": "~/x"}).data_path == Path.home() / "x"


def test_all_problems_are_reported_in_one_error() -> None:
    settings = {"queueCount": "four", "isOpen": "maybe", "dataPath": "", "unheardOf": "1"}
    with pytest.raises(InvalidArgument) as caught:
        configured(Example, settings)
    text = str(caught.value)
    assert "queueCount must be a whole number, got 'four'" in text
    assert "isOpen must be true or false, got 'maybe'" in text
    assert "dataPath must be a path, not empty, got ''" in text
    assert "unknown setting unheardOf; expected one of backupPath, bindAddress" in text
