"""A Spark session with settings for small batches of messages."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from turbopump.errors import InvalidArgument, MissingPackage, SparkError
from turbopump.spark.java import ensure_java

try:
    from pyspark.sql import SparkSession
except ImportError as error:
    raise MissingPackage.of_extra(
        "spark", "PySpark or one of its dependencies is not installed"
    ) from error

SETTINGS: Mapping[str, str] = {
    # Batches of messages are small: 200 shuffle partitions would cost more than the work.
    "spark.sql.shuffle.partitions": "4",
    # Halves the time of a micro-batch that is read by Python.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Message timestamps have no time zone; shown in the machine's, they would depend on it.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of every session created here."""

LOCAL_SETTINGS: Mapping[str, str] = {
    # For checkpoints on a local disk: plain renames, and no checksum file for each file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.ui.enabled": "false",
    # No other machine has to reach the driver, and no host name has to be resolved.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""Additional settings of sessions whose executors all run on this machine."""

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = Path(__file__).with_name("log4j2.properties")

_CONNECT = "sc://"
_CONNECT_PACKAGES = ("grpc", "grpc_status", "google.rpc", "zstandard")
"""What PySpark imports for a Spark Connect client, besides its usual dependencies."""

_MASTER_TIMEOUT_S = 5
_HADOOP_SETTINGS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")

_COUNT = r"0*[1-9]\d*"
_HOST_PORT = r"(\[[0-9a-fA-F:.]+\]|[^\s:,/\[\]]+):\d{1,5}"
_MASTER = re.compile(
    rf"local(\[({_COUNT}|\*)(\s*,\s*{_COUNT})?\])?"
    rf"|local-cluster\[\s*{_COUNT}\s*(,\s*{_COUNT}\s*){{2}}\]"
    rf"|spark://{_HOST_PORT}(,{_HOST_PORT})*|k8s://(https?://)?[^\s/]+.*|yarn",
    re.ASCII,
)


def session(
    app_name: str = "turbopump",
    *,
    master: str = "local[*]",
    remote: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a Spark session that knows ``rocketmq``, created with settings for messages.

    An existing session is returned unchanged. Java is located or provided first. With ``remote``
    instead of ``master``, the session is a Spark Connect client: of a server, such as
    ``sc://host:15002``, or of one that is started here, such as ``local[2]``.

    ::

        spark = turbopump.spark.session("orders", settings={"spark.driver.memory": "2g"})
    """
    from turbopump.spark.source import register

    spark = SparkSession.getActiveSession() or _new_session(
        app_name, master, remote, settings or {}
    )
    register(spark)
    return spark


def session_settings(master: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return all settings of a new session; the user's settings take precedence."""
    local = LOCAL_SETTINGS if master.startswith("local") else {}
    logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
    options = f"{logging} {own.get(_JAVA_OPTIONS, '')}".rstrip()
    return {**SETTINGS, **local, **own, _JAVA_OPTIONS: options}


def require_master(master: str) -> None:
    """Raise InvalidArgument unless it has the form of a master that Spark knows.

    Spark checks this too, but only after Java has started, and with pages of stack traces.
    """
    if master.startswith(_CONNECT):
        raise InvalidArgument(
            f"master must not be a Spark Connect server, got {master!r}: use "
            f'session(remote="{master}")'
        )
    if _MASTER.fullmatch(master) is None:
        raise InvalidArgument(
            "master must be local[N], local[*], spark://HOST:PORT, k8s://https://HOST:PORT or "
            f"yarn, got {master!r}"
        )


def require_reachable(master: str, environment: Mapping[str, str]) -> None:
    """Raise unless the master is reachable: Spark would retry for minutes or print pages."""
    if master == "yarn" and not any(environment.get(name) for name in _HADOOP_SETTINGS):
        raise InvalidArgument(
            f"master yarn needs {' or '.join(_HADOOP_SETTINGS)} in the environment: the directory "
            "with the settings of the Hadoop cluster"
        )
    if not master.startswith("spark://"):
        return
    failures = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _MASTER_TIMEOUT_S):
                return
        except (OSError, OverflowError, UnicodeError) as error:
            failures.append(f"{address}: {error}")
    raise SparkError(
        f"no Spark master answers at {master}: {'; '.join(failures)}; start it, or correct the "
        "address"
    )


def _require_remote(remote: str) -> None:
    """Raise unless PySpark can run as a Spark Connect client of this server.

    PySpark mistakes a program without a file, such as ``python -c``, for its own doctests, and
    without these packages exits as if it had succeeded.
    """
    if not remote.startswith((_CONNECT, "local")):
        raise InvalidArgument(f"remote must be sc://HOST:PORT or local[N], got {remote!r}")
    missing = [name for name in _CONNECT_PACKAGES if not _is_there(name)]
    if missing:
        raise MissingPackage(
            f"Spark Connect clients need {', '.join(missing)}, which the extra spark of turbopump "
            "does not install: pip install 'pyspark[connect]'"
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        # Not even its parent package exists.
        return False


def _new_session(
    app_name: str, master: str, remote: str | None, own: Mapping[str, str]
) -> SparkSession:
    if remote is None:
        require_master(master)
        require_reachable(master, os.environ)
    else:
        _require_remote(remote)
    builder = SparkSession.builder.appName(app_name)
    if remote is not None and remote.startswith(_CONNECT):
        # The server has its own settings; clients can change only those of queries.
        queries = {name: value for name, value in SETTINGS.items() if name.startswith("spark.sql.")}
        settings = {**queries, **own}
    else:
        ensure_java()
        # Executors run the driver's Python unless configured otherwise.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings = session_settings(remote or master, own)
    for name, value in settings.items():
        builder = builder.config(name, value)
    if remote is None:
        return builder.master(master).getOrCreate()
    with warnings.catch_warnings():
        # A server started here has all settings from its start; the client sets them again, and
        # warns about each that can be set only at the start.
        warnings.filterwarnings("ignore", "Failed to set", UserWarning)
        return builder.remote(remote).getOrCreate()
