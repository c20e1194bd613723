"""Every way to run Spark that the guide names, each in a process of its own.

What `local` does is the subject of all other tests here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

import spark_mode
from servers import STOP_S, Standalone
from turbopump.spark.java import find_java

PROGRAM = Path(spark_mode.__file__)
SPARK_HOME = Path(pyspark.__file__).parent
TIMEOUT_S = 400
"""Far longer than it takes, even beside others."""
SMALL = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}


def run(mode: Mapping[str, Any], nameserver: str, folder: Path) -> None:
    """Run the program and compare what it counts; it must not print anything else."""
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, json.dumps(mode), nameserver, str(folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [spark_mode.ROWS] * 5
    # On a busy machine Spark complains of workers and sessions that ended early; we must not.
    assert not re.search(r"[/.]turbopump[/.](client|spark|wire)", done.stderr), done.stderr


@pytest.mark.long
def test_local_cluster(broker: Standalone, tmp_path: Path) -> None:
    mode = {"master": "local-cluster[2,1,1024]", "settings": SMALL}
    run(mode, broker.nameserver, tmp_path / "checkpoint")


def test_connect(broker: Standalone, tmp_path: Path) -> None:
    run({"remote": "local[2]"}, broker.nameserver, tmp_path / "checkpoint")


def test_standalone_master_and_worker(broker: Standalone, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = stack.enter_context(
            spark_class("master.Master", ports, tmp_path, r"Starting Spark master at (spark://\S+)")
        )
        size = ["--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work")]
        stack.enter_context(
            spark_class(
                "worker.Worker", [*ports, *size, master], tmp_path, "(registered with master)"
            )
        )
        settings = {
            **SMALL,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
        mode = {"master": master, "settings": settings}
        run(mode, broker.nameserver, tmp_path / "checkpoint")


@contextmanager
def spark_class(name: str, arguments: Sequence[str], folder: Path, ready: str) -> Iterator[str]:
    """Run a part of a Spark cluster from the pip package; give what it says when it is ready."""
    environment = {
        **os.environ,
        "SPARK_HOME": str(SPARK_HOME),
        "JAVA_HOME": str(find_java(os.environ)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [
        str(SPARK_HOME / "bin" / "spark-class"),
        f"org.apache.spark.deploy.{name}",
        *arguments,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            seen = ""
            while (found := re.search(ready, seen)) is None:
                line = process.stderr.readline()
                assert line, seen
                seen += line
            # Somebody has to read what else it says, or it would wait for a reader one day.
            rest = threading.Thread(target=process.stderr.read)
            rest.start()
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            finally:
                process.kill()
        rest.join()
