"""A session on a machine without Java and outside an activated environment; what its user sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import bare_python
from servers import Standalone
from source_topics import fill, fresh_topic, made_topic

SET_BY_USERS = {
    *("JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "VIRTUAL_ENV"),
}

PROGRAM = """
import os
import sys
import turbopump.spark

spark = turbopump.spark.session("environment", master="local[2]")
rows = spark.read.format("rocketmq").options(nameserver=sys.argv[1], topic=sys.argv[2]).load()
# Spark closes the sockets of the workers before they have sent all rows.
assert len(rows.head(2)) + rows.limit(3).count() == 5
print(spark.range(3).selectExpr("sum(id)").collect()[0][0], os.environ["JAVA_HOME"])
assert turbopump.spark.session() is spark
spark.stop()
"""


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """All programs except Java; the Python that Spark finds first has no packages."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if program.name != "java" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    assert shutil.which("java", path=str(programs)) is None
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_USERS}
    return {**kept, "PATH": f"{bare_python(tmp_path)}:{programs}"}


def test_spark_runs_with_java_from_pypi_and_prints_nothing(
    without_java: dict[str, str], broker: Standalone
) -> None:
    topic = made_topic(broker.nameserver, fresh_topic(), queues=2)
    fill(broker.nameserver, topic, range(4000), queues=2)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, broker.nameserver, topic],
        capture_output=True,
        text=True,
        env=without_java,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total, home = done.stdout.split()
    assert total == "3"
    assert "turbopump-java-" in home
    assert done.stderr == ""
