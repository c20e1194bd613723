"""Archives that bring Turbopump to Spark cluster machines without installed packages.

An archive for ``--archives`` has all packages and a ``bin/python`` that starts the machine's own
Python with them. A zip for ``--py-files`` has only this package, with its plain core, which is many
times slower: compiled packages cannot be imported from a zip.
"""

from __future__ import annotations

import io
import os
import platform
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from isal import igzip

from turbopump.errors import InvalidArgument, MissingPackage

_OWN = ("turbopump", "pyspark_rocketmq", "pyspark_rocketmq_store")
_FOR_SPARK = ("pandas", "protobuf", "pyarrow")
"""What PySpark uses in workers; PySpark itself comes with the Spark of the cluster."""
_LEFT_OUT = "tests"
_OF_PYTEST = "-pytest-"
"""In the names of bytecode with rewritten assertions. Other bytecode is kept: Spark waits 10 s for
the first process of a stream, and compiling its imports takes much of that."""
_COMPILED_FROM = frozenset({".c", ".pxi", ".pyx"})
"""Sources of the compiled core, which executors get built or not at all."""
_ARCHIVES = (".tar.gz", ".tgz")
_ZIP = ".zip"

_LAUNCHER = """#!/bin/sh
# Starts the Python {version} of this machine with the packages of this archive.
home=$(cd "$(dirname "$0")/.." && pwd) || exit 1
if [ "$(uname -sm)" != "{system}" ]; then
    echo "turbopump: $home is for {system}, and this machine is $(uname -sm):" \\
        "run turbopump spark package on a machine like the executors" >&2
    exit 1
fi
PYTHONPATH="$home/lib${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
for python in "$TURBOPUMP_PYTHON" python{version}; do
    if command -v "$python" >/dev/null; then
        exec "$python" "$@"
    fi
done
for python in python3 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != {pair})' 2>/dev/null; then
        exec "$python" "$@"
    fi
done
echo "turbopump: no Python {version} on the PATH, which $home is for: install it, set" \\
    "TURBOPUMP_PYTHON, or run turbopump spark package with the Python of the executors" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class WrittenPackage:
    path: Path
    size: int
    distributions: tuple[str, ...]
    """Names and versions, as in ``msgspec 0.20.0``."""

    @property
    def is_complete(self) -> bool:
        """Whether it is for ``--archives`` rather than ``--py-files``."""
        return self.path.suffix != _ZIP


def write_package(path: Path) -> WrittenPackage:
    """Write an archive with everything that executors need, or a zip with only this package.

    The name decides: ``.tar.gz`` or ``.zip``. An existing file is replaced once the new one is
    complete. Raises MissingPackage if a package is not installed here.
    """
    if not path.name.endswith((*_ARCHIVES, _ZIP)):
        raise InvalidArgument(f"file must end in .tar.gz, .tgz or .zip, got {str(path)!r}")
    is_complete = path.suffix != _ZIP
    needed = _required(distribution("turbopump")) if is_complete else ()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        (_write_archive if is_complete else _write_zip)(unfinished, needed)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    names = (f"{each.name} {each.version}" for each in (distribution("turbopump"), *needed))
    return WrittenPackage(path, path.stat().st_size, tuple(names))


def _write_archive(to: Path, needed: Sequence[Distribution]) -> None:
    with (
        igzip.open(to, "wb") as compressed,  # type: ignore[no-untyped-call]
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        launcher = tarfile.TarInfo("bin/python")
        version = sys.version_info[:2]
        system = f"{platform.system()} {platform.machine()}"
        named = ".".join(map(str, version))
        text = _LAUNCHER.format(version=named, pair=version, system=system).encode()
        launcher.size, launcher.mode = len(text), 0o755
        archive.addfile(launcher, io.BytesIO(text))
        for name, file in _files(needed):
            archive.add(file, f"lib/{name}", recursive=False, filter=_without_owner)


def _write_zip(to: Path, needed: Sequence[Distribution]) -> None:
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in _files(needed):
            # Python imports no extension modules from a zip: the plain core runs.
            if name.suffix != ".so":
                archive.write(file, name)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _files(needed: Sequence[Distribution]) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield files by their names relative to a directory of packages."""
    home = Path(__file__).parents[2]
    for package in _OWN:
        for file in sorted((home / package).rglob("*")):
            if file.suffix in _COMPILED_FROM:
                continue
            yield from _wanted(PurePosixPath(file.relative_to(home)), file)
    for each in needed:
        for name in each.files or ():
            yield from _wanted(PurePosixPath(name), Path(str(each.locate_file(name))))


def _wanted(name: PurePosixPath, file: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    # Commands are outside, at ../../../bin.
    is_left_out = not {"..", _LEFT_OUT}.isdisjoint(name.parts) or _OF_PYTEST in name.name
    if not is_left_out and file.is_file():
        yield name, file


def _required(of: Distribution) -> tuple[Distribution, ...]:
    """Return the distributions that one requires, directly and indirectly, sorted by name."""
    found: dict[str, Distribution] = {}
    waiting = [*_requirements(of), *((name, False) for name in _FOR_SPARK)]
    while waiting:
        name, is_conditional = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError as missing:
            if is_conditional:
                # For another platform or version of Python.
                continue
            raise MissingPackage.of_extra(
                "spark", f"executors need {name}, which is not installed here"
            ) from missing
        waiting += _requirements(found[key])
    return tuple(found[key] for key in sorted(found))


def _requirements(of: Distribution) -> list[tuple[str, bool]]:
    """Return the names that a distribution requires, and whether conditionally; no extras."""
    found = []
    for text in of.requires or ():
        requirement, _, condition = text.partition(";")
        name = re.match(r"[\w.-]+", requirement.strip())
        if name is not None and "extra ==" not in condition:
            found.append((name[0], bool(condition)))
    return found
