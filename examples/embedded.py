"""A cluster for the examples: in this process, or the one whose name server is given.

::

    python examples/quick_start_producer.py                     # starts its own
    python examples/quick_start_producer.py 127.0.0.1:9876      # uses a running one
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from turbopump.testing import running_server


@contextmanager
def cluster(settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a name server address: the one given, or that of a cluster in a thread."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
    else:
        with own_cluster(settings) as address:
            yield address


@contextmanager
def own_cluster(settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a cluster in a thread and yield the address of its name server.

    ``settings`` are a broker's, by their names in its configuration file.
    """
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), settings) as server:
        yield server.nameserver


if __name__ == "__main__":
    with cluster() as nameserver:
        print(f"a cluster ran, with its name server at {nameserver}")
