"""The declared archive of the examples, run as users run it; minutes, so only in long runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from servers import Standalone
from turbopump import Message, Producer
from turbopump.spark.java import ensure_java

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "declarative_pipeline"
DATA = "/tmp/turbopump-declarative-pipeline"
RUN_S = 600


def run(project: Path, data: Path) -> str:
    # The session settings of the tests must not apply to this one.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    found = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-pipelines")),
            "--remote",
            "local[2]",
            "--conf",
            "spark.sql.catalogImplementation=hive",
            "--conf",
            f"spark.sql.warehouse.dir={data}/warehouse",
            "--conf",
            f"spark.hadoop.javax.jdo.option.ConnectionURL=jdbc:derby:{data}/metastore;create=true",
            "run",
        ],
        cwd=project,
        env={
            **environment,
            "JAVA_HOME": str(ensure_java()),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "src"),
        },
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def rows(table: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in table.rglob("*.parquet"))


@pytest.mark.long
def test_each_run_reads_what_arrived_since_the_last(broker: Standalone, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    assert DATA in text
    text = text.replace(DATA, str(tmp_path)).replace("127.0.0.1:9876", broker.nameserver)
    spec.write_text(text.replace("topics: orders", "topics: declared-orders"))

    with Producer("declared", nameserver=broker.nameserver) as producer:
        for total in (10, 20):
            for number in range(10):
                tag = "even" if number % 2 == 0 else "odd"
                producer.send(Message("declared-orders", str(number).encode(), tags=tag))
            assert "Run is COMPLETED" in run(project, tmp_path)
            assert rows(tmp_path / "warehouse" / "archived_messages") == total
            assert rows(tmp_path / "warehouse" / "messages_by_tag") == 2
