"""Settings as people write them, in TOML or ``key=value`` lines, and the dataclasses made of them.

A configuration is a frozen dataclass that checks itself. Its keys are its field names in camelCase
unless `setting` gives another; on the way in and out all values are texts.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints

from turbopump.errors import InvalidArgument

if TYPE_CHECKING:

    class Config(Protocol):
        """Any dataclass."""

        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


C = TypeVar("C", bound="Config")
T = TypeVar("T")

Settings = Mapping[str, str]

_KEY = "key"
PORT_MAX = 0xFFFF
_TEXT_CHARS_MAX = 255
"""Of names, addresses and the like: some are sent with every answer."""


def data_directory() -> Path:
    """Return where servers keep their data unless they are given a directory."""
    return Path.home() / ".turbopump"


def setting(
    key: str, default: T, least: int = 0, most: int | None = None, *, live: bool = False
) -> T:
    """Declare a dataclass field by its key and what `check_settings` accepts.

    Limits are those of a number, or of the length of a text. A ``live`` setting takes effect while
    the server runs.
    """
    declared: T = field(default=default, metadata=metadata(key, least, most, live=live))
    return declared


def metadata(
    key: str, least: int = 0, most: int | None = None, *, live: bool = False
) -> dict[str, Any]:
    """Return what `setting` knows of a field, for fields without a constant default."""
    return {_KEY: key, "least": least, "most": most, "live": live}


def nearest_key(key: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the known key that a misspelled one probably means, in any case of letters."""
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(key.lower(), by_lower, 1, similarity)
    return by_lower[near[0]] if near else None


# --- checks ---------------------------------------------------------------------------------------


class CheckedSettings:
    """A base of dataclasses that refuses values outside the limits of their fields."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_settings(self)


def check_settings(config: Any) -> None:
    """Raise InvalidArgument for a value outside the limits of its field.

    The error names the key, the value and what is expected.
    """
    for declared in fields(config):
        # Annotations are texts wherever they are not evaluated.
        check = _CHECKS.get(str(declared.type))
        if check is not None and _KEY in declared.metadata:
            limits = declared.metadata["least"], declared.metadata["most"]
            check(_key(declared), getattr(config, declared.name), *limits)


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """Refuse an invalid setting, naming its key, its value and what is expected."""
    if not ok:
        raise InvalidArgument(f"{key} must be {allowed}, got {value!r}")


def _check_int(key: str, value: object, least: int, most: int | None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if ok and most is not None:
        ok = isinstance(value, int) and value <= most
    allowed = f"at least {least}" if most is None else f"{least} to {most}"
    require(ok, key, value, f"a whole number, {allowed}")


def _check_bool(key: str, value: object, _least: int, _most: int | None) -> None:
    require(isinstance(value, bool), key, value, "true or false")


def _check_text(key: str, value: object, least: int, most: int | None) -> None:
    ok = isinstance(value, str) and len(value) >= least and not set(value) & set("\n\r\0")
    require(ok, key, value, "a text on one line" + (", not empty" if least else ""))
    chars_max = most or _TEXT_CHARS_MAX
    if isinstance(value, str) and len(value) > chars_max:
        raise InvalidArgument(f"{key} must be at most {chars_max} characters, got {len(value)}")


_CHECKS = {"int": _check_int, "bool": _check_bool, "str": _check_text}
"""By the type of a field."""


# --- texts and files ------------------------------------------------------------------------------


def parse_properties(text: str) -> dict[str, str]:
    """Read lines of ``key=value``; blank lines and those that start with # or ! are skipped."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not _is_entry(line):
            continue
        key, mark, value = line.partition("=")
        if not mark or not key.strip():
            raise InvalidArgument(f"line {number} must be key=value, got {line!r}")
        found[key.strip()] = value.strip()
    return found


def render_properties(settings: Settings) -> str:
    """Write lines of ``key=value``; the keys in order, so that two can be compared."""
    return "".join(f"{key}={settings[key]}\n" for key in sorted(settings))


def changed_properties(text: str, changes: Settings) -> str:
    """Return the lines with some values changed or added, and everything else as it was."""
    left = dict(changes)
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0].strip()
        changed = _is_entry(line) and key in changes
        lines.append(f"{key}={changes[key]}" if changed else line)
        if changed:
            left.pop(key, None)
    lines += [f"{key}={value}" for key, value in left.items()]
    return "".join(f"{line}\n" for line in lines)


def parse_toml(text: str) -> dict[str, str]:
    """Read TOML; keys of a table are preceded by its name and a dot."""
    try:
        return dict(_flat(tomllib.loads(text), ""))
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"not TOML: {error}") from error


def read_settings(path: Path) -> dict[str, str]:
    """Read a file, as TOML if its name ends so and as ``key=value`` lines otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"configuration {path} cannot be read: {error}") from error
    try:
        return parse_toml(text) if is_toml(path) else parse_properties(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"configuration {path}: {error}") from error


def is_toml(path: Path) -> bool:
    return path.suffix.lower() == ".toml"


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and line.lstrip()[0] not in "#!"


def _flat(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield prefix + key, str(value).lower()
        elif isinstance(value, str | int | float):
            yield prefix + key, str(value)
        else:
            raise InvalidArgument(
                f"{prefix}{key} must be a string, number or boolean, got {value!r}"
            )


# --- from settings to a configuration and back ----------------------------------------------------


def configured(config: type[C], settings: Settings) -> C:
    """Read a configuration; raises InvalidArgument that names every unknown key and bad value."""
    by_key = {_key(declared): declared.name for declared in fields(config)}
    types_by_name = get_type_hints(config)
    problems, values = [], {}
    for key, text in settings.items():
        name = by_key.get(key)
        if name is None:
            problems.append(f"unknown setting {key}; expected one of {', '.join(sorted(by_key))}")
            continue
        kind = _kind(types_by_name[name])
        try:
            values[name] = kind.read(text)
        except (ValueError, KeyError):
            problems.append(f"{key} must be {kind.allowed}, got {text!r}")
    if problems:
        raise InvalidArgument("; ".join(problems))
    return config(**values)


def described(config: Config) -> dict[str, str]:
    """Return every setting that has a value, by key, as the text that `configured` reads."""
    values = {_key(declared): getattr(config, declared.name) for declared in fields(config)}
    return {key: _written(value) for key, value in values.items() if value is not None}


def keys_of(kind: type[Config]) -> dict[str, str | None]:
    """Return every key of a configuration with the text of its default; None when it has none."""
    return {
        _key(declared): None
        if declared.default is MISSING or declared.default is None
        else _written(declared.default)
        for declared in fields(kind)
    }


def _key(declared: Field[Any]) -> str:
    first, *others = declared.name.split("_")
    return str(declared.metadata.get(_KEY, first + "".join(map(str.capitalize, others))))


def _written(value: object) -> str:
    return KINDS[Path if isinstance(value, Path) else type(value)].write(value)


def _kind(declared: Any) -> Kind:
    if isinstance(declared, types.UnionType):
        # A setting that may be absent: present, it is of the other type.
        declared = next(each for each in get_args(declared) if each is not types.NoneType)
    return KINDS[declared]


@dataclass(frozen=True, slots=True)
class Kind:
    """How the values of a type are written."""

    read: Callable[[str], Any]
    """Raises ValueError or KeyError for invalid text."""
    write: Callable[[Any], str]
    allowed: str


def _read_path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text).expanduser()


KINDS: dict[Any, Kind] = {
    bool: Kind(
        lambda text: {"true": True, "false": False}[text.lower()],
        lambda value: str(value).lower(),
        "true or false",
    ),
    int: Kind(int, str, "a whole number"),
    str: Kind(str, str, "a text"),
    Path: Kind(_read_path, str, "a path, not empty"),
}
"""By the type of a field."""
