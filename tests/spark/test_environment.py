"""A session on a machine without Java, and what its user gets to see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import turbopump.spark

spark = turbopump.spark.session("environment", master="local[1]")
print(spark.range(3).selectExpr("sum(id)").collect()[0][0], os.environ["JAVA_HOME"])
assert turbopump.spark.session() is spark
spark.stop()
"""


WORKER_SURPRISED_BY_THE_END = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"(  File .*daemon\.py.*\n(    .*\n)?)+"
    r"BrokenPipeError: .*\n"
)
"""What PySpark's own daemon prints now and then when Spark stops before it has answered."""


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment with all programs of the machine but Java."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if program.name != "java" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    assert shutil.which("java", path=str(programs)) is None
    return {**kept, "PATH": str(programs)}


def test_spark_runs_with_java_from_pypi_and_prints_nothing(without_java: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
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
    assert WORKER_SURPRISED_BY_THE_END.sub("", done.stderr) == ""
