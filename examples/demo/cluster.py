"""The cluster of the demo: ``turbopump standalone`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_STOP_S = 10.0


@contextmanager
def cluster(settings: Mapping[str, str], log: Path) -> Iterator[str]:
    """Run a name server and a broker, and give the name server's address.

    Settings go by the names that the broker's configuration file has for them.
    """
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
                yield _nameserver(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_S)
                finally:
                    process.kill()


def _nameserver(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    said = dict(part.partition("=")[::2] for part in process.stdout.readline().split())
    if "nameserver" not in said:
        raise RuntimeError(f"the cluster did not start: {log.read_text()}")
    return said["nameserver"]
