"""Names of a package that are imported on first use, so that importing the package stays fast."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], others: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package with an ``__all__``.

    ``homes`` has names by module of `turbopump`; the other names are those of the package
    ``others``.

    ::

        __getattr__, __dir__ = lazy_names(__name__, {"client.calls": "Found NothingNew"})
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"turbopump.{modules[name]}"), name)
        if others and name in sys.modules[package].__all__:
            return getattr(import_module(others), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def public() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return find, public
