"""The pytest plugin: a cluster in virtual time, and a server in real time, as fixtures.

Loaded in every pytest run where Turbopump is installed, so it imports nothing of it before a
fixture is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from turbopump.testing.cluster import Cluster
    from turbopump.testing.server import RunningServer

CLUSTER = "turbopump_cluster"
MARKER = "turbopump"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_MARKER_TEXT = (
    f"{MARKER}(brokers=1, nameservers=1, settings={{}}, seed=0, skips_idle_time=True): what the "
    f"fixtures {CLUSTER} and turbopump_server are to be like; settings are the broker's, by their "
    "keys in files"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER_TEXT)


@pytest.fixture
def turbopump_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A name server, a broker and their clients in virtual time; see docs/guide/testing.md."""
    from turbopump.testing.cluster import running_cluster

    wanted = _wanted(request, brokers=1, nameservers=1, settings={}, seed=0, skips_idle_time=True)
    with running_cluster(
        _directory(tmp_path_factory),
        _names(wanted["brokers"]),
        nameservers=wanted["nameservers"],
        settings=_texts(wanted["settings"]),
        seed=wanted["seed"],
        skips_idle_time=wanted["skips_idle_time"],
    ) as cluster:
        yield cluster


@pytest.fixture
def turbopump_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A name server and a broker on 127.0.0.1, in real time; see docs/guide/testing.md."""
    from turbopump.testing.server import running_server

    wanted = _wanted(request, brokers=1, settings={})
    settings, names = _texts(wanted["settings"]), _names(wanted["brokers"])
    with running_server(_directory(tmp_path_factory), settings, names) as server:
        yield server


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test that uses the cluster in the cluster's own time."""
    test = _coroutine_function(pyfuncitem)
    if CLUSTER not in pyfuncitem.fixturenames or test is None:
        return None
    cluster = cast("Cluster", pyfuncitem.funcargs[CLUSTER])
    names = inspect.signature(test).parameters
    given = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    cluster.run(test(**given))
    return True


def _coroutine_function(item: pytest.Function) -> Callable[..., Coroutine[Any, Any, object]] | None:
    test = item.obj
    if type(item).__module__.startswith("pytest_asyncio."):
        # In its automatic mode it replaces the test by a plain function, which would run the test
        # in an event loop of its own.
        test = getattr(test, "__wrapped__", test)
    return test if inspect.iscoroutinefunction(test) else None


def _directory(factory: pytest.TempPathFactory) -> Path:
    """Return a directory that is not the test's own ``tmp_path``, which it may want to be empty."""
    return factory.mktemp("turbopump")


def _wanted(request: pytest.FixtureRequest, **defaults: Any) -> dict[str, Any]:
    """Return the settings of the markers, nearest first; raises UsageError for unknown ones."""
    wanted = dict(defaults)
    for marker in reversed(list(request.node.iter_markers(MARKER))):
        unknown = set(marker.kwargs) - set(_CHECKS)
        if marker.args or unknown:
            what = f"{min(unknown)!r}" if unknown else f"{marker.args[0]!r} without a name"
            raise pytest.UsageError(f"mark {MARKER}: unknown argument {what}: {_MARKER_TEXT}")
        wanted |= {key: value for key, value in marker.kwargs.items() if key in defaults}
    for name, value in wanted.items():
        if not _CHECKS[name](value):
            raise pytest.UsageError(
                f"mark {MARKER}: {name} must be {_ALLOWED[name]}, got {value!r}"
            )
    return wanted


def _is_whole(value: object) -> bool:
    # True is a number in Python, but never meant as one here.
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "brokers": lambda value: _is_whole(value) and 0 <= value <= len(_LETTERS),
    "nameservers": lambda value: _is_whole(value) and 1 <= value <= len(_LETTERS),
    "settings": lambda value: isinstance(value, Mapping),
    "seed": _is_whole,
    "skips_idle_time": lambda value: isinstance(value, bool),
}
_ALLOWED = {
    "brokers": f"0 to {len(_LETTERS)}",
    "nameservers": f"1 to {len(_LETTERS)}",
    "settings": "a dict of settings by their keys in files",
    "seed": "a whole number",
    "skips_idle_time": "True or False",
}


def _names(count: int) -> list[str]:
    return [f"broker-{letter}" for letter in _LETTERS[:count]]


def _texts(settings: Mapping[str, object]) -> dict[str, str]:
    """Format settings as in a file: True is ``true``."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in settings.items()
    }
