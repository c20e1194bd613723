"""JSON as Java peers write it: bare integers and whole objects as keys, and references.

`loads` reads both that and proper JSON; `dumps` writes either. An object used as a key is read as
an `ObjectKey`, a mapping that can be hashed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from turbopump.errors import BodyError

DEPTH_MAX = 64

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile("true|false|null")
_REFERENCE = "$ref"
_QUEUE_FIELDS = {"topic", "brokerName", "queueId"}
_QUEUE_RENDERING = "MessageQueue [topic={topic}, brokerName={brokerName}, queueId={queueId}]"
_PATH_STEP = re.compile(r"\.((?:[^.\[\]\\]|\\.)+)|\[([0-9]{1,9})\]")

_encode = msgspec.json.encode


class ObjectKey(Mapping[str, Any]):
    """An object that stood where only a text may stand: as the key of another object."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(frozenset((str(name), str(value)) for name, value in self._fields.items()))

    def __repr__(self) -> str:
        return f"ObjectKey({self._fields!r})"


def loads(data: bytes | str, *, references: bool = True) -> Any:
    """Read JSON, proper or Java's; whatever is wrong with it is a BodyError that tells the byte.

    ``references`` says whether objects that only refer to another part are replaced by it.
    """
    text = _checked_text(data)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = _Parser(text).document()
    if text.count("[") + text.count("{") > DEPTH_MAX:
        _check_depth(value)
    return _Resolver(value).resolved() if references and _REFERENCE in text else value


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
    """Refuse what is nested too deep, without recursion of our own."""
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
    raise BodyError(f"not JSON: nested deeper than {DEPTH_MAX}")


def dumps(value: Any, *, bare_keys: bool = False) -> str:
    """Write compact JSON.

    With ``bare_keys`` integer keys are not quoted and objects stand as keys, as Java peers do it
    and some clients insist on; otherwise such keys become texts, objects the text of their JSON.
    """
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


class _Parser:
    """Reads one document; every method starts at ``_at`` and leaves it behind what it read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def document(self) -> Any:
        self._space()
        value = self._value()
        self._space()
        if self._at < len(self._text):
            raise self._error("nothing more was expected")
        return value

    def _value(self) -> Any:
        match self._text[self._at : self._at + 1]:
            case "{":
                return self._nested(self._object)
            case "[":
                return self._nested(self._array)
            case '"':
                return self._string()
            case _:
                return self._scalar()

    def _nested(self, read: Callable[[], Any]) -> Any:
        if self._depth >= DEPTH_MAX:
            raise self._error(f"nested deeper than {DEPTH_MAX}")
        self._depth += 1
        self._at += 1
        self._space()
        value = read()
        self._depth -= 1
        return value

    def _object(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not self._ends("}", first=not found):
            key = self._value()
            if isinstance(key, dict):
                key = ObjectKey(key)
            elif isinstance(key, bool) or not isinstance(key, str | int):
                raise self._error("a key must be a text, an integer or an object")
            self._expect(":")
            found[key] = self._value()
        return found

    def _array(self) -> list[Any]:
        found: list[Any] = []
        while not self._ends("]", first=not found):
            found.append(self._value())
        return found

    def _ends(self, bracket: str, *, first: bool) -> bool:
        self._space()
        if self._text.startswith(bracket, self._at):
            self._at += 1
            return True
        if not first:
            self._expect(",")
        return False

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise self._error("text is not closed or has a bare control character")
        try:
            value: str = msgspec.json.decode(match[0], type=str)
        except msgspec.DecodeError as error:
            raise self._error(str(error)) from error
        self._at = match.end()
        return value

    def _scalar(self) -> Any:
        for pattern, read in ((_NUMBER, msgspec.json.decode), (_WORD, _WORDS.__getitem__)):
            match = pattern.match(self._text, self._at)
            if match is not None:
                return self._read_scalar(match, read)
        raise self._error("a value was expected")

    def _read_scalar(self, match: re.Match[str], read: Callable[[str], Any]) -> Any:
        try:
            value = read(match[0])
        except msgspec.DecodeError as error:
            raise self._error(str(error)) from error
        self._at = match.end()
        return value

    def _expect(self, mark: str) -> None:
        self._space()
        if not self._text.startswith(mark, self._at):
            raise self._error(f"{mark!r} was expected")
        self._at += 1
        self._space()

    def _space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _error(self, reason: str) -> BodyError:
        seen = self._text[self._at : self._at + 12]
        found = repr(seen) if seen else "the end"
        position = len(self._text[: self._at].encode("utf-8", "surrogatepass"))
        return BodyError(f"not JSON: {reason}, found {found}", position)


class _Resolver:
    """Puts in place of each reference what it refers to; one that leads nowhere becomes None.

    Every path is followed once, and every object's queues are listed once, so that the time grows
    with the text and not with its square.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
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
        return None if endless else value

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
        """Return an object's items by their keys' rendering in Java, which names queues so."""
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
