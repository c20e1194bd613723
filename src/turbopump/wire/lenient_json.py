"""JSON as Java peers write it: bare integers and whole objects as keys, and references.

`loads` reads both that and standard JSON; `dumps` writes either. An integer used as a key is read
as its text, an object used as a key as an `ObjectKey`, a mapping that can be hashed. Strings are
hashed with a secret, integers are not: a peer could choose keys that share a hash.

The cost of reading grows with the length of the input and nothing else. When changing a pattern
here, keep its repetitions possessive (``*+``), so that no text makes it backtrack. Python 3.11.2
(Debian 12) loses its place in a repeated group if the last alternative fails after it has consumed
something, so an alternative that fails immediately comes last there: ``(?!)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from turbopump.errors import BodyError

DEPTH_MAX = 64

_BLANK = r"[ \t\r\n]*+"
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+'
_INTEGER_KEY = rf"-?+[0-9]++(?={_BLANK}:)"
_OBJECT_KEY = rf'\{{[^{{}}\[\]"]*+(?:{_STRING}"[^{{}}\[\]"]*+)*+\}}(?={_BLANK}:)'
_OTHER = (
    rf'[^"{{0-9-]++|{_STRING}(?:"|\\?\Z)|-?+[0-9]++(?!{_BLANK}:)|-(?![0-9])'
    rf"|(?!{_OBJECT_KEY})\{{|(?!)"
)
_BARE_KEY = re.compile(rf"((?:{_OTHER})*+)(?:({_INTEGER_KEY})|({_OBJECT_KEY})|\Z)", re.DOTALL)
"""The text before the next bare key, and the key; or all the rest of the text."""

_OPENING = '"{'
"""The start of an object that was a bare key, once quoted."""

_REFERENCE = "$ref"
_EXPANDED_PER_CHARACTER = 4
"""How many values references may expand to, per character of the text."""
_QUEUE_FIELDS = {"topic", "brokerName", "queueId"}
_QUEUE_RENDERING = "MessageQueue [topic={topic}, brokerName={brokerName}, queueId={queueId}]"
_PATH_STEP = re.compile(r"\.((?:[^.\[\]\\]|\\.)+)|\[([0-9]{1,9})\]")

_encode = msgspec.json.encode


class ObjectKey(Mapping[str, Any]):
    """An object used as the key of another object, where only a string may be."""

    __slots__ = ("_fields", "_identity")

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        # Of strings: 1 and "1" differ, and a peer cannot choose what shares a hash.
        self._identity = frozenset((name, repr(value)) for name, value in fields.items())

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"ObjectKey({self._fields!r})"


def loads(data: bytes | str, *, references: bool = True) -> Any:
    """Read JSON, standard or Java's; any error is a BodyError with its position.

    ``references`` says whether objects that only refer to another part are replaced by it.
    """
    text = _checked_text(data)
    quoted = None
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError:
        quoted = _BARE_KEY.sub(_quoted, text)
        value = _decoded_quoted(quoted, text)
    if text.count("[") + text.count("{") > DEPTH_MAX:
        _check_depth(value)
    if quoted is not None and _OPENING in quoted:
        value = with_object_keys(value)
    return _Resolver(value, len(text)).resolved() if references and _REFERENCE in text else value


def _checked_text(data: bytes | str) -> str:
    try:
        if isinstance(data, str):
            data.encode()
            return data
        return str(data, "utf-8")
    except UnicodeError as error:
        position = error.start if isinstance(error, UnicodeDecodeError | UnicodeEncodeError) else 0
        raise BodyError("text is not UTF-8", position) from error


def _check_depth(value: Any) -> None:
    """Refuse values nested too deep, without recursion."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> BodyError:
    return BodyError(f"not JSON: nested deeper than {DEPTH_MAX}")


def dumps(value: Any, *, bare_keys: bool = False) -> str:
    """Write compact JSON.

    With ``bare_keys`` integer keys are not quoted and objects are written as keys, as Java peers do
    and some clients require; otherwise such keys become strings, objects the text of their JSON.
    """
    if not bare_keys:
        # Many times as fast; it raises for objects as keys.
        with suppress(TypeError):
            return _encode(value).decode()
    if isinstance(value, Mapping):
        entries = (
            f"{_key(key, bare_keys)}:{dumps(item, bare_keys=bare_keys)}"
            for key, item in value.items()
        )
        return "{" + ",".join(entries) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join([dumps(item, bare_keys=bare_keys) for item in value]) + "]"
    return _encode(value).decode()


def _key(key: Any, bare: bool) -> str:
    if isinstance(key, str):
        return _encode(key).decode()
    if isinstance(key, int):
        return str(key) if bare else f'"{key}"'
    fields = key if isinstance(key, Mapping) else msgspec.to_builtins(key)
    text = dumps(fields, bare_keys=bare)
    return text if bare else _encode(text).decode()


# --- bare keys ------------------------------------------------------------------------------------


def _decoded_quoted(quoted: str, text: str) -> Any:
    """Read JSON whose bare keys were quoted; errors give positions in ``text``."""
    try:
        return msgspec.json.decode(quoted)
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        at = _position_before_quoting(text, error_position(str(error), quoted))
        seen = text.encode()[at : at + 12].decode(errors="replace")
        reason = str(error).partition(" (byte")[0].removeprefix("JSON is malformed: ")
        raise BodyError(f"not JSON: {reason}, found {seen!r}", at) from error


def _quoted(match: re.Match[str]) -> str:
    before, integer, fields = match.groups()
    if integer:
        return f'{before}"{integer}"'
    return f"{before}{_encode(fields).decode()}" if fields else before


def error_position(reason: str, text: str) -> int:
    """Find the byte of a msgspec error; if it names none, the text ends too early."""
    number = reason.rpartition("byte ")[2].rstrip(")")
    return int(number) if number.isdecimal() else len(text.encode())


def _position_before_quoting(text: str, position: int) -> int:
    """Return where a byte of the quoted text was before quoting."""
    quoted_end = bare_end = 0
    for match in _BARE_KEY.finditer(text):
        next_end = quoted_end + len(_quoted(match).encode())
        if next_end > position:
            break
        quoted_end, bare_end = next_end, bare_end + len(match[0].encode())
    return bare_end + position - quoted_end


def with_object_keys(value: Any) -> Any:
    """Turn keys that are the text of an object into that object."""
    if isinstance(value, dict):
        return {_opened(key): with_object_keys(item) for key, item in value.items()}
    return [with_object_keys(item) for item in value] if isinstance(value, list) else value


def _opened(key: Any) -> Any:
    if not isinstance(key, str) or not key.startswith("{"):
        return key
    try:
        fields = loads(key, references=False)
    except BodyError:
        return key
    return ObjectKey(fields) if isinstance(fields, dict) else key


# --- references -----------------------------------------------------------------------------------


class _Resolver:
    """Replaces each reference with what it refers to; one that leads nowhere becomes None.

    Every path is followed once, every object's queues are listed once, and the size of what all
    references together expand to is bounded, so that the time grows with the text and not with its
    square.
    """

    def __init__(self, root: Any, text_chars: int) -> None:
        self._root = root
        self._values_left = _EXPANDED_PER_CHARACTER * text_chars
        self._sizes: dict[int, int] = {}
        self._followed: dict[str, Any] = {}
        self._queues: dict[int, dict[str, Any]] = {}

    def resolved(self) -> Any:
        return self._resolve(self._root, ())

    def _resolve(self, value: Any, ancestors: tuple[Any, ...]) -> Any:
        inside = (*ancestors, value)
        if _is_reference(value):
            return self._referred(value[_REFERENCE], inside)
        if isinstance(value, dict):
            return {key: self._resolve(item, inside) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, inside) for item in value]
        return value

    def _referred(self, path: str, ancestors: tuple[Any, ...]) -> Any:
        if path not in self._followed:
            self._followed[path] = self._follow(path) if path.startswith("$") else None
        value = self._followed[path]
        # A reference to another one, or to something that contains it, would never end.
        endless = _is_reference(value) or any(value is ancestor for ancestor in ancestors)
        if endless:
            return None
        self._charge(value)
        return value

    def _charge(self, value: Any) -> None:
        size = self._sizes.get(id(value))
        if size is None:
            size = self._sizes[id(value)] = _size(value, self._values_left)
        self._values_left -= size
        if self._values_left < 0:
            raise BodyError("references expand to far more than the text itself")

    def _follow(self, path: str) -> Any:
        value = self._root
        for name, index in _PATH_STEP.findall(path):
            try:
                value = value[int(index)] if index else self._member(value, name)
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def _member(self, value: Any, name: str) -> Any:
        if not isinstance(value, Mapping):
            raise KeyError(name)
        plain = re.sub(r"\\(.)", r"\1", name)
        return value[plain] if plain in value else self._queues_of(value)[plain]

    def _queues_of(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        """Return an object's items by their keys' Java rendering, which names queues."""
        found = self._queues.get(id(value))
        if found is None:
            found = self._queues[id(value)] = {
                _QUEUE_RENDERING.format_map(key): item
                for key, item in value.items()
                if isinstance(key, ObjectKey) and set(key) >= _QUEUE_FIELDS
            }
        return found


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_REFERENCE), str)


def _size(value: Any, at_most: int) -> int:
    """Count the values within a value, up to a limit."""
    count, left = 0, [value]
    while left and count <= at_most:
        each = left.pop()
        count += 1
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
    return count
