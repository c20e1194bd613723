"""Parameters of the public API: one word for each thing, and durations without a unit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

import pytest

MODULES = (
    "turbopump", "turbopump.aio", "turbopump.admin", "turbopump.spark",
    "turbopump.spark.pipelines", "turbopump.testing",
)  # fmt: skip
WITH_UNIT = ("_ms", "_us", "_ns", "_s", "_seconds", "_millis", "_minutes")
OTHER_WORDS = frozenset({
    "ordered", "is_orderly", "max_retries", "max_reconsume_times", "attempts_max", "batch_max",
    "threads", "threads_max", "workers", "subscribe_to",
})  # fmt: skip
LOW_LEVEL = frozenset({
    # Requests of the protocol, and what clocks and loops count with.
    "Session.request", "Session.oneway", "VirtualClock.advance_ns", "VirtualTimeLoop.watched",
    "Pace.duration_s",
})  # fmt: skip
TIMESTAMPS = frozenset({"born_timestamp_ms", "store_timestamp_ms", "start_epoch_ms"})
RATES = frozenset({"rate_per_s"})


def parameters(module: str) -> Iterator[tuple[str, str]]:
    """Yield what users call, and the name of each parameter."""
    yield from ((what, parameter.name) for what, parameter in annotated(module))


def annotated(module: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield what users call, and each parameter; not what only describes a result."""
    found = import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if not inspect.isclass(value):
            calls = [(name, value)] if callable(value) else []
        elif module in ("turbopump.admin", "turbopump.spark.pipelines"):
            calls = methods(name, value)
        else:
            of_its_own = not issubclass(value, Exception) or "__init__" in vars(value)
            calls = [*[(name, value)] * of_its_own, *methods(name, value)]
        for what, call in calls:
            if what in LOW_LEVEL:
                continue
            yield from ((what, each) for each in inspect.signature(call).parameters.values())


def methods(name: str, kind: type) -> list[tuple[str, object]]:
    return [
        (f"{name}.{key}", value)
        for key, value in inspect.getmembers(kind, inspect.isfunction)
        if not key.startswith("_")
    ]


@pytest.mark.parametrize("module", MODULES)
def test_durations_have_no_unit_in_their_names(module: str) -> None:
    found = set(parameters(module))
    assert found
    allowed = TIMESTAMPS | RATES
    assert [each for each in found if each[1].endswith(WITH_UNIT) and each[1] not in allowed] == []


@pytest.mark.parametrize("module", MODULES)
def test_durations_may_be_seconds_too(module: str) -> None:
    with_timedelta = [each for each in annotated(module) if "timedelta" in str(each[1].annotation)]
    assert [each for each in with_timedelta if "float" not in str(each[1].annotation)] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_same_things_have_the_same_words(module: str) -> None:
    assert [each for each in parameters(module) if each[1] in OTHER_WORDS] == []
