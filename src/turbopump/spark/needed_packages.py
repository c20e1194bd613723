"""What a source says where packages that it needs cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turbopump.errors import MissingPackage


@contextmanager
def needs_packages(name: str) -> Iterator[None]:
    """Raise MissingPackage if an import fails inside, which names the format of a source."""
    try:
        yield
    except MissingPackage:
        raise
    except ImportError as error:
        raise MissingPackage.of_extra(
            "spark",
            f'format("{name}") cannot be used here: {error}. Drivers and executors need its '
            "packages",
        ) from error
