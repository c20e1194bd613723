"""The settings of a session, without creating one."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import pytest

from turbopump.errors import InvalidArgument, MissingPackage, SparkError
from turbopump.spark import session_builder
from turbopump.spark.session_builder import (
    LOCAL_SETTINGS,
    SETTINGS,
    require_master,
    require_reachable,
    session_settings,
)

LOGGING = "-Dlog4j2.configurationFile=file:"


def test_the_users_own_settings_win() -> None:
    own = {"spark.sql.shuffle.partitions": "9", "spark.driver.extraJavaOptions": "-Xss4m"}
    found = session_settings("local[2]", own)
    assert found["spark.sql.shuffle.partitions"] == "9"
    assert found["spark.driver.extraJavaOptions"].startswith(LOGGING)
    assert found["spark.driver.extraJavaOptions"].endswith(" -Xss4m")
    assert set(found) >= set(SETTINGS) | set(LOCAL_SETTINGS)


@pytest.mark.parametrize("master", ["spark://10.0.0.1:7077", "yarn", "k8s://https://10.0.0.1"])
def test_executors_elsewhere_must_reach_the_driver(master: str) -> None:
    assert not set(LOCAL_SETTINGS) & set(session_settings(master, {}))
    assert set(LOCAL_SETTINGS) <= set(session_settings("local-cluster[2,1,1024]", {}))


def test_an_invalid_remote() -> None:
    with pytest.raises(InvalidArgument, match="remote must be sc://HOST:PORT"):
        session_builder._new_session("x", "local", "spark://x", {})


@pytest.mark.parametrize("name", ["grpc", "grpc_status", "google", "google.rpc", "zstandard"])
@pytest.mark.parametrize("remote", ["local[2]", "sc://127.0.0.1:1"])
def test_missing_packages_of_connect_are_reported(
    name: str, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(name, monkeypatch)
    told = rf"Connect clients need {name}.*: pip install 'pyspark\[connect\]'"
    with pytest.raises(MissingPackage, match=told):
        session_builder._new_session("x", "local", remote, {})


def hide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package appear not installed to `find_spec`."""

    def found(wanted: str) -> object:
        if wanted == name:
            return None
        if wanted.startswith(f"{name}."):
            raise ModuleNotFoundError(name)
        return find_spec(wanted)

    monkeypatch.setattr(session_builder, "find_spec", found)


@pytest.mark.slow
def test_a_program_without_connect_fails_with_an_error() -> None:
    # PySpark mistakes a program without a file for its own doctests, and exits with 0.
    program = (
        "import sys; sys.modules['grpc'] = None\n"
        "import turbopump.spark\n"
        "try:\n    turbopump.spark.session(remote='sc://127.0.0.1:1')\n"
        "except turbopump.errors.MissingPackage as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'pyspark[connect]'" in told.stdout


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[*]",
        "local[2]",
        "local[2, 3]",
        "local[*,3]",
        "local-cluster[2, 1, 1024]",
        "spark://a:7077,b:7077",
        "spark://[::1]:7077",
        "k8s://10.0.0.1:6443",
        "k8s://https://10.0.0.1:6443",
        "yarn",
    ],
)
def test_masters_that_spark_knows(master: str) -> None:
    require_master(master)


@pytest.mark.parametrize(
    "master",
    [
        "",
        "foo",
        "local[x]",
        "local[0]",
        "local[]",
        "local-cluster[2]",
        "spark://",
        "spark://host",
        "spark://host:",
        "spark://a:7077,b",
        "spark://http://a:7077",
        "k8s://",
        "Yarn",
    ],
)
def test_masters_that_spark_would_reject(master: str) -> None:
    told = re.escape(f"or yarn, got {master!r}")
    with pytest.raises(InvalidArgument, match=told):
        session_builder._new_session("x", master, None, {})


def started_java() -> None:
    raise AssertionError("Java was started")


def test_a_master_that_does_not_answer_is_an_error_before_java_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_builder, "ensure_java", started_java)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port},127.0.0.1:99999"
    with pytest.raises(
        SparkError, match=rf"no Spark master answers at {master}: .*{port}: .*refused"
    ):
        session_builder._new_session("x", master, None, {})


def test_one_master_that_answers_is_enough() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as free,
        closing(socket.create_server(("127.0.0.1", 0))) as master,
    ):
        port = free.getsockname()[1]
        free.close()
        require_reachable(f"spark://127.0.0.1:{port},127.0.0.1:{master.getsockname()[1]}", {})


def test_yarn_needs_the_settings_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_builder, "ensure_java", started_java)
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
        require_reachable("yarn", {name: "/etc/hadoop"})
    with pytest.raises(InvalidArgument, match="yarn needs HADOOP_CONF_DIR or YARN_CONF_DIR"):
        session_builder._new_session("x", "yarn", None, {})


def test_a_server_of_connect_is_no_master() -> None:
    with pytest.raises(InvalidArgument, match=r'session\(remote="sc://h:15002"\)'):
        session_builder._new_session("x", "sc://h:15002", None, {})


def test_the_error_for_missing_pyspark_names_how_to_install_it() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import turbopump.spark\n"
        "try:\n    turbopump.spark.session()\n"
        "except turbopump.errors.MissingPackage as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "extra spark, in a checkout: pip install '.[spark]'" in told.stdout
