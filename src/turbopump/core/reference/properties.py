"""Properties in their text form: entries of a name and a value, without parsing all of them."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.core.reference.layout import ENTRY_END, NAME_END


def property_value(text: bytes, name: bytes) -> bytes | None:
    """Return the value of a property; the last one that is not empty counts."""
    found = None
    for entry in text.split(ENTRY_END):
        own, separator, value = entry.partition(NAME_END)
        if own == name and separator and value:
            found = value
    return found


def pop_property(text: bytes, name: bytes) -> tuple[bytes, bytes | None]:
    """Return the text without the first entry of a name and without a final end mark; its value."""
    mark = ENTRY_END + name + NAME_END
    if text.startswith(mark[1:]):
        value, _, rest = text[len(mark) - 1 :].partition(ENTRY_END)
        return rest.removesuffix(ENTRY_END), value
    before, found, rest = text.partition(mark)
    if not found:
        return text.removesuffix(ENTRY_END), None
    value, end, rest = rest.partition(ENTRY_END)
    return (before + ENTRY_END + rest).removesuffix(ENTRY_END) if end else before, value


def parse_properties(text: bytes) -> dict[str, str]:
    """Parse the text form; malformed entries are skipped, as every peer does."""
    return dict(_entries(text.decode("utf-8", "replace")))


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split(ENTRY_END.decode()):
        name, separator, value = entry.partition(NAME_END.decode())
        if separator and name and value:
            yield name, value
