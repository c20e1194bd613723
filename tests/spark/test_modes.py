"""Every way to run Spark that the guide names, each in its own process.

All other tests here cover `local`.
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
from programs import bare_python
from servers import STOP_S, Standalone
from turbopump.spark.executor_package import write_package
from turbopump.spark.java import find_java

PROGRAM = Path(spark_mode.__file__)
SPARK_HOME = Path(pyspark.__file__).parent
TIMEOUT_S = 400
"""Far longer than it takes, even on a busy machine."""
SMALL = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}


def run(
    mode: Mapping[str, Any],
    nameserver: str,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Run the program and compare its counts; it must not print anything else."""
    done = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, json.dumps(mode), nameserver, str(folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [spark_mode.ROWS] * 5
    assert "BrokenPipeError" not in done.stderr, done.stderr
    # On a busy machine Spark complains of workers and sessions that ended early; we must not.
    assert not re.search(r"[/.]turbopump[/.](client|spark|wire)", done.stderr), done.stderr


@pytest.mark.long
def test_local_cluster(broker: Standalone, tmp_path: Path) -> None:
    mode = {"master": "local-cluster[2,1,1024]", "settings": SMALL}
    run(mode, broker.nameserver, tmp_path / "checkpoint")


def test_connect(broker: Standalone, tmp_path: Path) -> None:
    run({"remote": "local[2]"}, broker.nameserver, tmp_path / "checkpoint")


def test_standalone_master_and_worker_without_packages(broker: Standalone, tmp_path: Path) -> None:
    """The Python of driver processes and the worker has only what the archive contains."""
    archive = write_package(tmp_path / "turbopump-spark.tar.gz").path
    # Where the driver runs; Spark unpacks it for executors.
    (tmp_path / "turbopump").mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path / "turbopump"], check=True)
    environment = {**os.environ, "PATH": f"{bare_python(tmp_path)}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    with ExitStack() as stack:
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        ready = r"Starting Spark master at (spark://\S+)"
        master = stack.enter_context(spark_class("master.Master", ports, environment, ready))
        size = ["--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work")]
        arguments = [*ports, *size, master]
        ready = "(registered with master)"
        stack.enter_context(spark_class("worker.Worker", arguments, environment, ready))
        settings = {
            **SMALL,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.archives": f"{archive}#turbopump",
        }
        mode = {"master": master, "settings": settings}
        environment["PYSPARK_PYTHON"] = "./turbopump/bin/python"
        run(mode, broker.nameserver, tmp_path / "checkpoint", environment)
    assert list(tmp_path.glob("work/app-*/*/turbopump/bin/python")), "not used"


READS_FROM_ZIP = """
import sys, turbopump.spark
spark = turbopump.spark.session("app")
cluster = {"nameserver": sys.argv[1], "topic": "py-files"}
rows = spark.sql("select cast(id as string) body from range(100)")
rows.write.format("rocketmq").options(**cluster).mode("append").save()
found = spark.read.format("rocketmq").options(**cluster).load()
print(turbopump.__file__, found.count())
"""


def test_py_files(broker: Standalone, tmp_path: Path) -> None:
    """The recipe for workers that have the dependencies, but not Turbopump."""
    package = write_package(tmp_path / "turbopump-spark.zip").path
    (tmp_path / "app.py").write_text(READS_FROM_ZIP)
    environment = {
        # The compiled core cannot be imported from a zip.
        **{name: text for name, text in os.environ.items() if name != "TURBOPUMP_CORE"},
        "PYTHONPATH": str(package),
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(find_java(os.environ)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    submit = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[1]"]
    program = ["--py-files", str(package), str(tmp_path / "app.py"), broker.nameserver]
    done = subprocess.run(
        [*submit, *program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{package}/turbopump/__init__.py", "100"]


@contextmanager
def spark_class(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], ready: str
) -> Iterator[str]:
    """Run a part of a Spark cluster from the pip package; yield its output once it is ready."""
    environment = {
        **environment,
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
            # Its further output must be read, or it would eventually block.
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
