"""The settings of a session, without making one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turbopump.errors import InvalidArgument
from turbopump.spark import local
from turbopump.spark.local import LOCAL_SETTINGS, SETTINGS, session_settings

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


def test_remote_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="remote is 'spark://x': sc://host:port"):
        local._made("x", "local", "spark://x", {})


def test_missing_pyspark_says_how_to_install_it() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import turbopump.spark\n"
        "try:\n    turbopump.spark.session()\n"
        "except turbopump.errors.MissingPackage as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install turbopump[spark]" in told.stdout
