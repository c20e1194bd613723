"""The scripts on a fresh clone: an empty home directory, no Java, nothing prepared.

Everything is real except the download of the locked packages, which this environment already has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = (
    *("README.md", "LICENSE", "hatch_build.py", "pyproject.toml"),
    *("requirements", "scripts", "src", "tests"),
)
TOOLS = ("bash", "cat", "cut", "dirname", "env", "flock", "mkdir", "rm", "sh", "sha256sum")
TIMEOUT_S = 180

pytestmark = pytest.mark.slow

PYTHON = """#!/bin/sh
# The machine's Python, but for the download: -m pip --python .venv/bin/python install ... -r LOCK
printf '%s\\n' "$*" >>{calls}
case "$*" in
    *"pip --version"*) {has_pip} ;;
    *ensurepip*) exit 1 ;;
    *"-r requirements/"*)
        packages=$("$4" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        printf '%s\\n' {site} >"$packages/locked.pth"
        exit 0 ;;
esac
exec {python} "$@"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with only standard tools and a clone."""

    clone: Path
    tools: Path
    home: Path
    calls_file: Path

    def calls(self) -> list[str]:
        """Return the Python invocations since the last call."""
        found = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return found

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.home,
            env={"PATH": str(self.tools), "HOME": str(self.home), **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", str(self.clone / "scripts" / "setup.sh"), **environment)

    def install_python(self, *, has_pip: bool = True) -> None:
        text = PYTHON.format(
            calls=self.calls_file,
            has_pip=":" if has_pip else "exit 1",
            site=sysconfig.get_path("purelib"),
            python=Path(sys.executable).resolve(),
        )
        (self.tools / "python3").write_text(text)
        (self.tools / "python3").chmod(0o755)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    base = tmp_path_factory.mktemp("machine")
    made = Machine(base / "a clone", base / "bin", base / "home", base / "calls")
    for directory in (made.clone, made.tools, made.home):
        directory.mkdir()
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.so")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made.clone / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, made.clone / name)
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (made.tools / name).symlink_to(found)
    made.install_python()
    return made


@pytest.fixture(scope="module")
def ready(machine: Machine) -> Machine:
    """The machine after the first run."""
    assert shutil.which("java", path=str(machine.tools)) is None
    first = machine.set_up()
    assert first.returncode == 0, first.stderr
    assert re.fullmatch(
        r"turbopump: setting up .venv; .* \(first run only\)\n"
        r"turbopump: the plain core is used, .*: no C compiler is found; install .*\n",
        first.stderr,
    )
    assert [call for call in machine.calls() if "--require-hashes -r requirements/dev.lock" in call]
    return machine


def installs(machine: Machine) -> list[str]:
    return [call for call in machine.calls() if " install " in call or "-m venv" in call]


def test_the_environment_is_set_up_for_this_clone(ready: Machine) -> None:
    done = ready.run(
        str(ready.clone / ".venv" / "bin" / "python"),
        "-c",
        "import turbopump; print(turbopump.__file__)",
    )
    assert Path(done.stdout.strip()) == ready.clone / "src" / "turbopump" / "__init__.py"


def test_the_second_run_does_nothing(ready: Machine) -> None:
    again = ready.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert installs(ready) == []


def test_tests_run(ready: Machine) -> None:
    script = str(ready.clone / "scripts" / "test")
    done = ready.run(
        script, "--quick", "-q", "-p", "no:cacheprovider", "tests/unit/test_settings.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert installs(ready) == []


def test_spark_has_a_java_without_one_on_the_path(ready: Machine) -> None:
    program = "from turbopump.spark.java import ensure_java; print(ensure_java())"
    found = ready.run(str(ready.clone / ".venv" / "bin" / "python"), "-c", program)
    assert found.returncode == 0, found.stderr
    java = Path(found.stdout.strip()) / "bin" / "java"
    version = ready.run(str(java), "-version")
    assert version.returncode == 0, version.stderr
    assert "version" in version.stderr


def test_changed_requirements_are_noticed(ready: Machine) -> None:
    with (ready.clone / "requirements" / "dev.lock").open("a") as file:
        file.write("# changed\n")
    assert "first run only" in ready.set_up().stderr
    assert len(installs(ready)) == 3
    assert ready.set_up().stderr == ""


def test_a_damaged_environment_is_recreated(ready: Machine) -> None:
    (packages,) = (ready.clone / ".venv").glob("lib/python3.*/site-packages")
    (packages / "locked.pth").unlink()
    assert "first run only" in ready.set_up().stderr
    assert len(installs(ready)) == 3


def test_a_clone_that_was_moved_is_set_up_again(ready: Machine) -> None:
    moved = ready.clone.with_name("moved")
    ready.clone.rename(moved)
    try:
        done = ready.run("bash", str(moved / "scripts" / "setup.sh"))
        assert "first run only" in done.stderr
        assert done.returncode == 0, done.stderr
    finally:
        shutil.rmtree(moved / ".venv")
        moved.rename(ready.clone)


def test_what_is_missing_is_named(machine: Machine) -> None:
    none = machine.set_up(PYTHON="python9")
    assert none.returncode == 1
    assert none.stderr == (
        "turbopump: python9 not found; install Python 3.11 or newer, or set PYTHON\n"
    )
    old = machine.tools / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    too_old = machine.set_up(PYTHON="python-old")
    assert too_old.returncode == 1
    assert too_old.stderr == (
        "turbopump: Python 3.11 or newer is required, but python-old is older; "
        "set PYTHON to a newer one\n"
    )


def test_without_pip_the_error_says_what_to_do(machine: Machine) -> None:
    shutil.rmtree(machine.clone / ".venv", ignore_errors=True)
    machine.install_python(has_pip=False)
    without = machine.tools / "no-ensurepip"
    without.mkdir(exist_ok=True)
    (without / "ensurepip.py").write_text("raise SystemExit(1)\n")
    try:
        # Hide ensurepip, which the environment's own Python would otherwise have.
        done = machine.set_up(PYTHONPATH=str(without))
    finally:
        machine.install_python()
        shutil.rmtree(without)
    assert done.returncode == 1
    assert "pip not found; install it (Debian: apt-get install python3-pip)" in done.stderr
    assert not (machine.clone / ".venv" / ".complete").exists(), "the next run creates it again"
