"""The demo's cluster: ``turbopump standalone`` in its own process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_STOP_S = 10.0


class Addresses(NamedTuple):
    """Where the name server and the broker listen."""

    nameserver: str
    broker: str


@contextmanager
def cluster(settings: Mapping[str, str], log: Path) -> Iterator[Addresses]:
    """Run a name server and a broker; settings have the names of the configuration file."""
    with tempfile.TemporaryDirectory(prefix="turbopump-demo-") as folder:
        config = Path(folder) / "broker.conf"
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        options = ["--dir", folder, "--nameserver-port", "0", "--broker-port", "0"]
        command = [sys.executable, "-m", "turbopump", "standalone", *options]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [*command, "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                yield _addresses(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_S)
                finally:
                    process.kill()


def _addresses(process: subprocess.Popen[str], log: Path) -> Addresses:
    assert process.stdout is not None
    ready = dict(part.partition("=")[::2] for part in process.stdout.readline().split())
    if "nameserver" not in ready:
        raise RuntimeError(f"the cluster did not start: {log.read_text()}")
    return Addresses(ready["nameserver"], ready["broker"])
