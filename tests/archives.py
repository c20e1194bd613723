"""Unpacking archives on every supported Python."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract(archive: Path, into: Path) -> None:
    """Unpack a tar archive into a directory."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            # Python 3.11.2, which Debian 12 ships, has no filters; later releases expect one.
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(into)
