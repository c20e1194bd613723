"""Builds the compiled core, where a C compiler and Python's headers are available.

Hatchling calls `CoreBuildHook` for wheels and editable installs. Without a compiler they have the
plain core only: one line on stderr says why, and what to do. ``python hatch_build.py`` builds the
core in place unless it is up to date; ``--sanitize`` builds it with AddressSanitizer and UBSan
elsewhere, and prints where.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
MODULE = "turbopump.core.compiled"
SOURCES = Path("src/turbopump/core")
LIBRARY = "compiled" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")
BUILD = Path("build/core")
LOG = "build.log"

COMPILERS = ("cc", "gcc", "clang")
ALWAYS = ("-shared", "-fPIC", "-fvisibility=hidden", "-w")
OPTIMIZED = ("-O2", "-fwrapv", "-DNDEBUG", "-g0")
SANITIZED = (
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)

ERROR = re.compile(r"error:|\.px[id]:\d+:\d+:|\.pyx:\d+:\d+:")
"""A line of the C compiler, or of Cython, that says what is wrong."""
INSTALL = "install a C compiler and Python's headers (Debian: apt-get install gcc python3-dev)"


class BuildFailed(Exception):
    """The core cannot be built; the message has the reason and the remedy."""

    def __init__(self, reason: str, remedy: str, output: str = "") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.output = output


class Core:
    """The core of a source tree; either optimized, in place, or sanitized, elsewhere."""

    # Not a dataclass: hatchling does not put this module into sys.modules, which they need.
    def __init__(self, root: Path, *, is_sanitized: bool = False) -> None:
        directory = root / BUILD / ("sanitized" if is_sanitized else "")
        self.root = root
        self.flags = SANITIZED if is_sanitized else OPTIMIZED
        self.library = (directory if is_sanitized else root / SOURCES) / LIBRARY
        self.stamp = directory / f"{LIBRARY}.built"
        """Holds a digest of what the library was built from, or of what could not be built."""

    def is_current(self) -> bool:
        return self.library.exists() and self._stamped() == self._digest()

    def update(self, *, again: bool = True) -> None:
        """Build the library unless it is up to date; a stale one never stays.

        Without ``again``, a build that would only repeat an error is left out.
        """
        if self._is_settled(again=again):
            return
        with _locked(self.stamp.with_name("lock")):
            # Another process may have built it meanwhile.
            if not self._is_settled(again=again):
                self._rebuild()

    def build(self, directory: Path) -> Path:
        """Translate and compile the core; return the library in the directory."""
        compiler, includes = _compiler(), _includes()
        if _cython_version() is None:
            raise BuildFailed("Cython is missing", "run pip install cython")
        source, library = directory / "compiled.c", directory / LIBRARY
        translate = (sys.executable, "-m", "cython", "-3", "--module-name", MODULE)
        _run("cython", *translate, "--output-file", source, self.root / SOURCES / "compiled.pyx")
        flags = (*ALWAYS, *self.flags, *_extra_flags())
        _run(compiler[0], *compiler, *flags, *includes, source, "-o", library)
        return library

    def _is_settled(self, *, again: bool) -> bool:
        has_failed_before = self._stamped() == self._digest(_tools())
        return self.is_current() or (has_failed_before and not again)

    def _rebuild(self) -> None:
        log = self.stamp.with_name(LOG)
        log.unlink(missing_ok=True)
        self.stamp.unlink(missing_ok=True)
        # Before the build: sources that change meanwhile are built the next time.
        digest, failed = self._digest(), self._digest(_tools())
        self.library.unlink(missing_ok=True)
        self.library.parent.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(dir=self.stamp.parent) as directory:
                self.build(Path(directory)).replace(self.library)
        except BuildFailed as error:
            self.stamp.write_text(failed, encoding="utf-8")
            if not error.output:
                raise
            log.write_text(error.output, encoding="utf-8")
            raise BuildFailed(error.reason, f"see {log}") from None
        self.stamp.write_text(digest, encoding="utf-8")

    def _stamped(self) -> str | None:
        try:
            return self.stamp.read_text(encoding="utf-8")
        except OSError:
            return None

    def _digest(self, tools: str = "") -> str:
        """Digest everything that the library depends on."""
        parts = [LIBRARY, _cython_version() or "", *self.flags, *_extra_flags(), tools]
        digest = hashlib.sha256("\0".join(parts).encode())
        suffixes = {".pyx", ".pxi", ".pxd", ".h"}
        sources = (path for path in (self.root / SOURCES).iterdir() if path.suffix in suffixes)
        for path in (Path(__file__), *sorted(sources)):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled core to wheels, and builds it in place for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core; a wheel with it is for this platform and Python only."""
        core = Core(Path(self.root))
        try:
            if version == "editable":
                core.update()
                return
            library = core.library if core.is_current() else self._built(core)
        except (BuildFailed, OSError) as error:
            _warn(error)
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(library)] = f"turbopump/core/{LIBRARY}"

    def _built(self, core: Core) -> Path:
        # Outside the source tree, which may be read-only; deleted when the build ends.
        self._directory = TemporaryDirectory(prefix="turbopump-core-")
        return core.build(Path(self._directory.name))


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildFailed(f"CC={chosen[0]} is not found", INSTALL)
        return chosen
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise BuildFailed("no C compiler is found", INSTALL)
    return [found]


def _extra_flags() -> list[str]:
    return shlex.split(os.environ.get("CFLAGS", ""))


def _includes() -> list[str]:
    directories = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    if not any(Path(each, "Python.h").exists() for each in directories):
        raise BuildFailed("Python's headers are not found", INSTALL)
    return [f"-I{each}" for each in sorted(directories)]


def _cython_version() -> str | None:
    try:
        return version("cython")
    except PackageNotFoundError:
        return None


def _tools() -> str:
    """Describe what a build needs besides the sources: if it changes, a new attempt is worth it."""
    try:
        return " ".join([*_compiler(), *_includes()])
    except BuildFailed as missing:
        return str(missing)


def _run(name: str, *command: str | Path) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.search(line) and "warning:" not in line]
        line = (errors or [*lines[-1:], f"exit code {done.returncode}"])[0]
        tool = Path(name).name
        raise BuildFailed(f"{tool}: {line}", "install turbopump again when it works", done.stdout)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from building at the same time."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _warn(error: Exception) -> None:
    reason = " ".join(str(error).split())
    print(f"turbopump: the plain core is used, which is slower: {reason}", file=sys.stderr)


def main(*arguments: str) -> int:
    """Build in place; a failure is an error only of a build that was asked for: ``--sanitize``."""
    if arguments == ("--sanitize",):
        core = Core(ROOT, is_sanitized=True)
    elif arguments:
        print("usage: python hatch_build.py [--sanitize]", file=sys.stderr)
        return 2
    else:
        core = Core(ROOT)
    try:
        core.update(again=bool(arguments))
    except (BuildFailed, OSError) as error:
        if arguments:
            print(f"turbopump: {error}", file=sys.stderr)
            return 1
        _warn(error)
        return 0
    if arguments:
        print(core.library)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
