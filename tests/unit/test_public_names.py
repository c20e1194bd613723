"""The names that users import: complete, the same everywhere, and imported when first used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import turbopump
import turbopump.aio
from turbopump import errors

HEAVY = ("asyncio", "numpy", "opentelemetry", "rich", "ssl", "typer", "turbopump.client")
PACKAGES = ("turbopump", "turbopump.admin", "turbopump.aio", "turbopump.spark")


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_is_light(package: str) -> None:
    script = f"""
import sys, {package}
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_imported(package: str) -> None:
    module = import_module(package)
    assert dir(module) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = module.Missing


def test_all_names_can_be_imported_without_opentelemetry() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
from turbopump import *
from turbopump.aio import *
assert SendTracing and ConsumeTracing
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_both_packages_have_every_error() -> None:
    wanted = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.TurbopumpError)
    }
    assert wanted <= set(turbopump.__all__) & set(turbopump.aio.__all__)
    assert all(getattr(turbopump, name) is getattr(errors, name) for name in wanted)


def test_every_name_that_is_another_with_a_loop_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs/api/aio.md").read_text()
    others = {
        name
        for name in turbopump.aio.__all__
        if getattr(turbopump.aio, name) is not getattr(turbopump, name, None)
    }
    assert set(re.findall(r"autoclass:: turbopump\.aio\.(\w+)", page)) == others


def test_names_are_the_same_with_and_without_a_loop() -> None:
    only_here = set(turbopump.__all__) ^ set(turbopump.aio.__all__)
    assert only_here == {"Admin", "Session", "__version__", "run"}
    # Blocking or not; everything else is the very same object.
    differing = {
        name
        for name in set(turbopump.__all__) & set(turbopump.aio.__all__)
        if getattr(turbopump, name) is not getattr(turbopump.aio, name)
    }
    assert differing == {
        "LitePullConsumer",
        "Producer",
        "PullConsumer",
        "PushConsumer",
        "Transaction",
        "TransactionProducer",
        "Worker",
    }
