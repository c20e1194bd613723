"""The process that Spark runs for each stream, started as Spark does."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from turbopump.spark.source import DefaultSource

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
INITIAL_OFFSET = 884
ROWS_MAX = 1000
WAIT_S = 60


def number(value: int) -> bytes:
    return struct.pack(">i", value)


def with_length(data: bytes) -> bytes:
    return number(len(data)) + data


def opening(files: Path) -> bytes:
    """Return what Spark sends first: versions, files, the source and its schema."""
    source = DefaultSource({"nameserver": "127.0.0.1:1", "topic": "orders"})
    schema = StructType([StructField("body", BinaryType())])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return b"".join(
        [
            with_length(version.encode()),
            with_length(str(files).encode()),
            number(0),
            with_length(pickle.dumps(source)),
            with_length(schema.json().encode()),
            number(ROWS_MAX),
        ]
    )


@pytest.mark.slow
def test_a_stream_that_is_stopped_prints_nothing(tmp_path: Path) -> None:
    """Spark closes the socket of a query that is stopped while it waits for the process."""
    path = tmp_path / "socket"
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SOCK_PATH": str(path)}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(WAIT_S)
        with subprocess.Popen(
            [sys.executable, "-m", RUNNER], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            spark, _ = listening.accept()
            with spark, spark.makefile("rb") as answers:
                spark.settimeout(WAIT_S)
                assert answers.read(4) == number(process.pid)
                spark.sendall(opening(tmp_path))
                assert answers.read(4) == number(0)
                spark.sendall(number(INITIAL_OFFSET))
                (size,) = struct.unpack(">i", answers.read(4))
                assert json.loads(answers.read(size)) == {}
            _, printed = process.communicate(timeout=WAIT_S)
    assert printed == ""
