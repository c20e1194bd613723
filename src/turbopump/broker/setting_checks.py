"""Checks of settings: errors name the key, its value and what is expected."""

from __future__ import annotations

from turbopump.errors import InvalidArgument

PORT_MAX = 0xFFFF

_TEXT_CHARS_MAX = 255
"""Of names, addresses and the like: some are sent with every answer."""


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """Refuse an invalid setting, naming its key, its value and what is expected."""
    if not ok:
        raise InvalidArgument(f"{key} must be {allowed}, got {value!r}")


def require_int(key: str, value: object, least: int, most: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if ok and most is not None:
        ok = isinstance(value, int) and value <= most
    allowed = f"at least {least}" if most is None else f"{least} to {most}"
    require(ok, key, value, f"a whole number, {allowed}")


def require_bool(key: str, value: object) -> None:
    require(isinstance(value, bool), key, value, "true or false")


def require_text(key: str, value: object, *, empty: bool = False) -> None:
    ok = isinstance(value, str) and (empty or bool(value)) and not set(value) & set("\n\r\0")
    require(ok, key, value, "a text on one line")
    if isinstance(value, str) and len(value) > _TEXT_CHARS_MAX:
        text = f"{key} must be at most {_TEXT_CHARS_MAX} characters, got {len(value)}"
        raise InvalidArgument(text)
