"""What is published: the wheel and the sdist, installed into an otherwise empty environment."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message as Metadata
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from archives import extract
from commands import ready_addresses
from documents import blocks
from servers import standalone
from turbopump import __version__

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
LIBRARY = f"turbopump/core/compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
NO_CORE = (
    "turbopump: the plain core is used, which is slower: no C compiler is found; install a C"
    " compiler and Python's headers (Debian: apt-get install gcc python3-dev)"
)
EXTRAS = ("dashboard", "spark", "tracing")

pytestmark = pytest.mark.slow

ROUND_TRIP = """
import sys
from turbopump import LitePullConsumer, Message, Producer
with Producer("shop", nameserver=sys.argv[1]) as producer:
    producer.send(Message("orders", b"hello"))
with LitePullConsumer(
    "audit", nameserver=sys.argv[1], subscriptions={"orders": "*"}, start_from="first"
) as consumer:
    print(next(consumer).body.decode())
print([name for name in sys.modules if name.startswith(("pyspark", "pyarrow", "pandas"))])
"""

SPARK = """
import sys, turbopump.spark
spark = turbopump.spark.session(master="local[1]")
at = {"nameserver": sys.argv[1], "topic": "numbers"}
rows = spark.createDataFrame([(str(number).encode(),) for number in (1, 2, 3)], "body binary")
rows.write.format("rocketmq").options(**at).mode("append").save()
read = spark.read.format("rocketmq").options(**at, startingOffsets="earliest").load()
print(sorted(int(row.body) for row in read.select("body").collect()))
spark.stop()
"""


def run(*command: str | Path, at: Path) -> str:
    """Run a command outside the source tree, which must not be found by accident."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(at), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=at,
        env=clean,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, into: Path, *targets: str) -> list[Path]:
    """Build offline: all requirements are installed."""
    options = [part for target in targets for part in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", "-d", into, *options, at=source)
    return sorted(into.iterdir())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    wheel, sdist = built(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[0]


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def text_in(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"turbopump-{__version__}.dist-info/{name}").decode()


def core_of(wheel: Path) -> str:
    """Return the core that runs from a wheel."""
    return "compiled" if LIBRARY in names_in(wheel) else "plain"


def metadata_of(wheel: Path) -> Metadata:
    return email.message_from_string(text_in(wheel, "METADATA"))


# --- what is inside -------------------------------------------------------------------------------


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        "pyspark_rocketmq",
        "pyspark_rocketmq_store",
        "turbopump",
        f"turbopump-{__version__}.dist-info",
    }
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file()
        and not any(part.startswith((".", "__pyc")) for part in path.parts)
        # In the tree there may be some for other versions of Python.
        and path.suffix != ".so"
    }
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged - {LIBRARY} == sources
    assert "turbopump/py.typed" in names


def test_the_metadata_describes_the_project(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "turbopump"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(EXTRAS) <= set(metadata.get_all("Provides-Extra", []))
    # The project has no address yet, and a placeholder would send users nowhere.
    assert metadata.get_all("Project-URL", []) == []
    assert "Home-page" not in metadata
    assert "Apache License" in text_in(wheel, "licenses/LICENSE")


def test_the_entry_points_are_the_command_and_the_plugin(wheel: Path) -> None:
    assert text_in(wheel, "entry_points.txt").split("\n") == [
        "[console_scripts]",
        "turbopump = turbopump.cli:main",
        "",
        "[pytest11]",
        "turbopump = turbopump.testing.pytest_plugin",
        "",
    ]


def test_spark_is_an_extra(wheel: Path) -> None:
    wanted = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    plain = {each.name for each in wanted if each.marker is None or each.marker.evaluate()}
    spark = {
        each.name for each in wanted if each.marker and each.marker.evaluate({"extra": "spark"})
    }
    assert "pyspark" not in plain
    assert "pyspark" in spark


def test_the_sdist_makes_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = distributions
    extract(sdist, tmp_path)
    source = tmp_path / f"turbopump-{__version__}"
    for name in ("LICENSE", "Dockerfile", "scripts/test", "requirements/dev.lock", "tests/data"):
        assert (source / name).exists(), name
    (again,) = built(source, tmp_path / "dist", "wheel")
    assert names_in(again) == names_in(wheel)


# --- installed ------------------------------------------------------------------------------------


def needed(requirements: list[str], extra: str = "") -> Iterator[Distribution]:
    """Return the installed distributions that satisfy requirements, including transitive ones."""
    waiting = [(Requirement(text), extra) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, wanted_as = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": wanted_as}):
            continue
        for each in ("", *requirement.extras):
            if (requirement.name, each) not in seen:
                seen.add((requirement.name, each))
                found = distribution(requirement.name)
                yield found
                waiting += [(Requirement(text), each) for text in found.requires or []]


def borrow(found: Distribution, into: Path) -> None:
    """Link a distribution of this environment into another, as if it were installed there."""
    for file in found.files or []:
        top = file.parts[0]
        if top != ".." and top != "__pycache__" and not (into / top).exists():
            (into / top).symlink_to(Path(str(found.locate_file(top))).resolve())


def installed(wheel: Path, home: Path, extra: str = "") -> Path:
    """Create an environment with the wheel and its declared requirements, offline."""
    try:
        venv.create(home, with_pip=True)
    except subprocess.CalledProcessError:
        pytest.skip("this Python cannot put pip into an environment (Debian: python3-venv)")
    (packages,) = home.glob("lib/python3.*/site-packages")
    for found in needed(metadata_of(wheel).get_all("Requires-Dist", []), extra):
        borrow(found, packages)
    # Fails if anything that the wheel requires is missing.
    named = f"{wheel}[{extra}]" if extra else str(wheel)
    run(home / "bin" / "pip", "install", "--quiet", "--no-index", named, at=home)
    return home


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("empty") / "venv")


def test_an_environment_with_nothing_else_has_a_working_command(
    environment: Path, wheel: Path, tmp_path: Path
) -> None:
    command, python = environment / "bin" / "turbopump", environment / "bin" / "python"
    shown = f"turbopump {__version__} (core: {core_of(wheel)})\n"
    assert run(command, "--version", at=tmp_path) == shown
    assert run(python, "-m", "turbopump", "--version", at=tmp_path) == shown
    run(python, "-m", "pip", "check", at=tmp_path)
    with serving(environment, tmp_path) as nameserver:
        output = run(python, "-W", "error", "-c", ROUND_TRIP, nameserver, at=tmp_path)
    assert output == "hello\n[]\n"


# --- without a compiler ---------------------------------------------------------------------------


@pytest.fixture
def source(distributions: tuple[Path, Path], tmp_path: Path) -> Path:
    """A source tree in which nothing has been built."""
    extract(distributions[1], tmp_path)
    (found,) = tmp_path.glob("turbopump-*")
    assert list((found / "src" / "turbopump" / "core").glob("*.pyx"))
    assert not list(found.rglob("*.so"))
    return found


def without_compiler(tmp_path: Path) -> dict[str, str]:
    """Return an environment with nothing on its PATH but a shell."""
    (tmp_path / "no-cc").mkdir()
    (tmp_path / "no-cc" / "sh").symlink_to("/bin/sh")
    return {
        "PATH": str(tmp_path / "no-cc"),
        "HOME": str(tmp_path),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }


@pytest.mark.parametrize("is_sane", [True, False])
def test_a_build_without_a_working_compiler_warns_and_is_plain(
    source: Path, tmp_path: Path, is_sane: bool
) -> None:
    clean, warning = without_compiler(tmp_path), NO_CORE
    if not is_sane:
        broken = tmp_path / "no-cc" / "gcc"
        broken.write_text("#!/bin/sh\necho 'gcc: fatal error: no such thing' >&2\nexit 1\n")
        broken.chmod(0o755)
        warning = (
            "turbopump: the plain core is used, which is slower: gcc: gcc: fatal error: no such"
            " thing; install turbopump again when it works"
        )
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist", "-t", "wheel"],
        cwd=source,
        env=clean,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "turbopump:" in line] == [warning]
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"turbopump-{__version__}-py3-none-any.whl"
    assert core_of(wheel) == "plain"


def test_an_installation_without_a_compiler_works(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    try:
        venv.create(home, with_pip=True)
    except subprocess.CalledProcessError:
        pytest.skip("this Python cannot put pip into an environment (Debian: python3-venv)")
    (packages,) = home.glob("lib/python3.*/site-packages")
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    for found in needed(project["build-system"]["requires"] + project["project"]["dependencies"]):
        borrow(found, packages)
    options = ("--verbose", "--no-index", "--no-build-isolation")
    done = subprocess.run(
        [home / "bin" / "python", "-m", "pip", "install", *options, source],
        cwd=tmp_path,
        env=without_compiler(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = map(str.strip, done.stdout.splitlines())
    assert [line for line in lines if line.startswith("turbopump: ")] == [NO_CORE]
    shown = f"turbopump {__version__} (core: plain)\n"
    assert run(home / "bin" / "turbopump", "--version", at=tmp_path) == shown
    with serving(home, tmp_path) as nameserver:
        output = run(
            home / "bin" / "python", "-W", "error", "-c", ROUND_TRIP, nameserver, at=tmp_path
        )
    assert output == "hello\n[]\n"


@contextmanager
def serving(environment: Path, home: Path) -> Iterator[str]:
    """Run the environment's own server, and yield the address of its name server."""
    options = ("--dir", str(home / "data"), "--nameserver-port", "0", "--broker-port", "0")
    with subprocess.Popen(
        [environment / "bin" / "turbopump", "standalone", *options],
        cwd=home,
        # It has its own core.
        env={name: text for name, text in os.environ.items() if name != "TURBOPUMP_CORE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            yield ready_addresses(server)["nameserver"]
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()


def test_the_quick_start_works_with_the_python_of_the_system(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Debian's own Python refuses installs outside virtual environments (PEP 668)."""
    extract(distributions[1], tmp_path)
    (checkout,) = tmp_path.glob("turbopump-*")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(system_python())
    shown = next(block for block in blocks("console") if "turbopump standalone" in block.text)
    *setup, serve, ready = shown.text.splitlines()
    options = "--nameserver-port 0 --broker-port 0"
    script = "\n".join(line.removeprefix("$ ") for line in [*setup, f"exec {serve[2:]} {options}"])
    own = ("PYTHON", "TURBOPUMP_CORE")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    with subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=checkout,
        env={**clean, "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if line.startswith("ready"))
            assert settled(line) == settled(ready) + "\n"
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()


def settled(line: str) -> str:
    """Return a ready line without what depends on the machine."""
    return re.sub(r":\d+|(?<= core=)\w+", "", line)


def system_python() -> str:
    """Return the system's own Python if it can be used, otherwise the one `.venv` is built from."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    for python in ("/usr/bin/python3", os.environ.get("PYTHON", "python3")):
        found = shutil.which(python)
        if found and subprocess.run([found, "-c", check], check=False).returncode == 0:
            return found
    pytest.skip("no Python 3.11 with pip outside the virtual environment")


def test_an_environment_with_spark_has_the_pipeline(wheel: Path, tmp_path: Path) -> None:
    environment = installed(wheel, tmp_path / "venv", "spark")
    with serving(environment, tmp_path) as nameserver:
        output = run(environment / "bin" / "python", "-c", SPARK, nameserver, at=tmp_path)
    assert output == "[1, 2, 3]\n"


def test_without_spark_the_pipeline_names_what_to_install(
    environment: Path, tmp_path: Path
) -> None:
    program = (
        "try:\n    from turbopump.spark import session\n"
        "except ImportError as error:\n    print(error)\n"
    )
    output = run(environment / "bin" / "python", "-c", program, at=tmp_path)
    assert "extra spark, in a checkout: pip install '.[spark]'" in output


# --- the image ------------------------------------------------------------------------------------

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """Return the Dockerfile's instructions, each with its arguments on one line."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    split = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return [(name, " ".join(rest.split())) for name, _, rest in split]


def stages() -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def last(name: str) -> str:
    """Return the arguments of the only such instruction in the final stage."""
    (arguments,) = [arguments for each, arguments in stages()[-1] if each == name]
    return arguments


def command_of(text: str) -> list[str]:
    """Parse the exec form: no shell between the server and its signals."""
    command = json.loads(text)
    assert all(isinstance(part, str) for part in command)
    assert command[0] == "turbopump"
    return [sys.executable, "-m", *command]


def test_the_image_is_slim_and_not_root() -> None:
    assert len(stages()) == 2
    assert {stage[0][1].split()[0] for stage in stages()} == {"python:3.11-slim"}
    names = [name for name, _ in stages()[-1]]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert last("USER") == "10001:10001"
    # A volume gets the owner of the directory that existed before it was declared.
    assert names.index("RUN") < names.index("VOLUME")
    assert "SHELL" not in names


def test_the_image_runs_a_command_that_exists(tmp_path: Path) -> None:
    command = command_of(last("ENTRYPOINT"))
    (volume,) = json.loads(last("VOLUME"))
    environment = {**os.environ, "HOME": str(tmp_path), "TURBOPUMP_ADVERTISE": "192.0.2.7"}
    done = subprocess.run(
        [*command, "--print-config"], env=environment, capture_output=True, text=True, check=True
    )
    settings = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert settings["broker.storePathRootDir"] == f"{volume}/store"
    assert settings["nameserver.kvConfigPath"] == f"{volume}/namesrv/kvConfig.json"
    assert settings["broker.bindAddress"] == settings["nameserver.bindAddress"] == "0.0.0.0"
    assert settings["broker.brokerIP1"] == "192.0.2.7"
    ports = [settings["nameserver.listenPort"], settings["broker.listenPort"]]
    assert last("EXPOSE").split() == ports


def test_the_image_has_a_health_check(tmp_path: Path) -> None:
    options, _, check = last("HEALTHCHECK").partition(" CMD ")
    assert options.split()[0].startswith("--interval=")
    command = command_of(check)
    assert command[-2:] == ["--nameserver", "127.0.0.1:9876"]
    with standalone(tmp_path) as server:
        well = [*command[:-1], server.nameserver]
        assert subprocess.run(well, capture_output=True, check=False).returncode == 0
        server.kill()
        assert subprocess.run(well, capture_output=True, check=False).returncode == 1


def test_the_image_is_built_from_what_is_copied(tmp_path: Path) -> None:
    """Even with .dockerignore, which excludes everything that it does not name."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    for name, arguments in stages()[0]:
        if name == "COPY":
            for source in arguments.split()[:-1]:
                assert f"!{source}" in ignored, source
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, tmp_path / source)
    (wheel,) = built(tmp_path, tmp_path / "dist", "wheel")
    assert wheel.name.startswith(f"turbopump-{__version__}-")
    assert {LIBRARY} & set(names_in(wheel)) == (
        {LIBRARY} if find_spec("turbopump.core.compiled") else set()
    )
