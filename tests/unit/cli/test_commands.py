"""Commands that end by themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer._click import Command, Context
from typer.core import TyperGroup
from typer.main import get_group
from typer.testing import CliRunner, Result

from turbopump.broker.config_keys import parse
from turbopump.cli.app import SUB_APPS, add_lazily, app
from turbopump.cli.standalone import further_brokers, reachable, slave_changes
from turbopump.core import CORE_NAME
from turbopump.settings import parse_properties
from turbopump.version import __version__

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400"})


def printed_config(*arguments: str, command: str = "nameserver") -> dict[str, str]:
    result = run(command, "--print-config", *arguments)
    assert result.exit_code == 0, result.output
    return parse_properties(result.stdout)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (
        0,
        f"turbopump {__version__} (core: {CORE_NAME})\n",
    )


def test_console_script_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["turbopump"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_importing_the_command_line_is_light() -> None:
    """Everything it imports is imported on every shell completion."""
    heavy = ("numpy", "uvloop", "asyncio", "turbopump.store", "turbopump.net")
    program = f"""
import sys, turbopump.cli.app
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_defaults_are_printed() -> None:
    config = printed_config()
    assert config["listenPort"] == "9876"
    assert config["bindAddress"] == "127.0.0.1"
    assert config["kvConfigPath"].endswith("namesrv/kvConfig.json")
    assert "configStorePath" not in config


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text('connectionsMax = 5\n[nameserver]\nbindAddress = "h"\nlistenPort = 1\n')
    config = printed_config("--config", str(path), "--port", "2", "--host", "i")
    assert (config["listenPort"], config["bindAddress"]) == ("2", "i")
    assert config["connectionsMax"] == "5"
    assert "configStorePath" not in config


def test_changes_are_saved_to_a_properties_file(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("listenPort=1\n")
    assert printed_config("--config", str(path))["configStorePath"] == str(path)
    path.write_text("configStorePath=/elsewhere\n")
    assert printed_config("--config", str(path))["configStorePath"] == "/elsewhere"


def test_printed_settings_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "all.conf"
    path.write_text(run("nameserver", "--print-config", "--port", "1").stdout)
    printed = printed_config("--config", str(path))
    assert printed == {**parse_properties(path.read_text()), "configStorePath": str(path)}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("listenPort=abc", "listenPort must be a whole number, got 'abc'"),
        ("listenPort=65536", "listenPort must be a whole number, 0 to 65535, got 65536"),
        ("connectionsMax=0", "connectionsMax must be a whole number, at least 1, got 0"),
        ("brokersMax=0", "brokersMax must be a whole number, at least 1, got 0"),
        ("topicsMax=-1", "topicsMax must be a whole number, at least 1, got -1"),
        ("orderMessageEnable=1", "orderMessageEnable must be true or false, got '1'"),
        ("listenport=1", "unknown setting listenport; expected one of bindAddress"),
        ("other.listenPort=1", "section must be nameserver or broker, got other"),
        ("listenPort", "line 1"),
    ],
)
def test_bad_setting_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.conf"
    path.write_text(text)
    result = run("nameserver", "--config", str(path))
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("port", ["65536", "-1", "abc", ""])
def test_bad_port_is_named(port: str) -> None:
    result = run("nameserver", "--port", port)
    assert result.exit_code == 2
    assert f"'--port': must be 0–65535, got '{port}'" in result.stderr


@pytest.mark.parametrize("arguments", [["nameserver", "--prot", "1"], ["nonsense"]])
def test_unknown_arguments_are_rejected(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[-2 if len(arguments) > 1 else -1] in result.stderr


# --- broker and standalone ------------------------------------------------------------------------


def test_options_override_the_file_of_a_broker(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("listenPort=1\nbrokerName=mine\nnamesrvAddr=a:1\n")
    arguments = ["--port", "2", "--nameserver", "b:1;c:2", "--dir", str(tmp_path)]
    config = printed_config("--config", str(path), *arguments, command="broker")
    assert config["listenPort"] == "2"
    assert config["brokerName"] == "mine"
    assert config["namesrvAddr"] == "b:1;c:2"
    assert config["storePathRootDir"] == str(tmp_path / "store")


def test_printed_settings_of_a_broker_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "all.conf"
    path.write_text(run("broker", "--print-config", "--port", "1").stdout)
    printed = printed_config("--config", str(path), command="broker")
    assert printed == parse_properties(path.read_text())


def test_standalone_has_a_section_for_each(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text('brokerName = "mine"\n[nameserver]\nlistenPort = 1\n[broker]\nlistenPort = 2\n')
    config = printed_config("--config", str(path), "--dir", str(tmp_path), command="standalone")
    assert config["nameserver.listenPort"] == "1"
    assert config["broker.listenPort"] == "2"
    assert config["broker.brokerName"] == "mine"
    assert config["nameserver.kvConfigPath"] == str(tmp_path / "namesrv" / "kvConfig.json")
    assert config["broker.storePathRootDir"] == str(tmp_path / "store")


def test_standalone_has_two_ports() -> None:
    config = printed_config("--nameserver-port", "1", "--broker-port", "2", command="standalone")
    assert (config["nameserver.listenPort"], config["broker.listenPort"]) == ("1", "2")


def test_printed_settings_of_both_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "all.conf"
    path.write_text(run("standalone", "--print-config", "--host", "0.0.0.0").stdout)
    printed = printed_config("--config", str(path), command="standalone")
    assert printed == parse_properties(path.read_text())


@pytest.mark.parametrize("command", ["broker", "standalone"])
def test_bad_setting_of_a_broker_is_named(tmp_path: Path, command: str) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("listenPort=abc")
    result = run(command, "--config", str(path))
    assert result.exit_code == 2
    assert "listenPort must be a whole number, got 'abc'" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--brokers", "0"), "0 is not in the range 1<=x<=64"),
        (("--brokers", "65"), "65 is not in the range 1<=x<=64"),
        (("--brokers", "two"), "Invalid value for '--brokers'"),
        (("--brokers", "2", "--replicas", "1"), "--brokers 2 and --replicas 1 cannot be combined"),
        (
            ("--brokers", "3", "--broker-port", "65520"),
            "listenPort must be a whole number, 0 to 65535, got 65540",
        ),
    ],
)
def test_invalid_brokers_are_rejected(options: tuple[str, ...], error: str) -> None:
    result = run("standalone", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in result.stderr


def test_several_brokers_cannot_be_slaves(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("brokerRole=SLAVE\nbrokerId=1\n")
    result = run("standalone", "--brokers", "2", "--config", str(path))
    assert result.exit_code == 2
    assert "--brokers 2 needs masters, got brokerRole=SLAVE" in result.stderr


def test_additional_brokers_have_their_own_names_directories_and_ports() -> None:
    settings = {"storePathRootDir": "/d/store", "brokerName": "b", "filterServerPort": "7000"}
    first = {**settings, "filterServerNums": "2", "listenPort": "100", "haListenPort": "5"}
    second, third = (parse(each) for each in further_brokers(first, parse(first), 3, 0))
    assert second.identity.broker_name == "b-2"
    assert third.directory == Path("/d/store-3")
    assert [each.identity.port for each in (second, third)] == [110, 120]
    assert [each.filters.server_port for each in (second, third)] == [7002, 7004]
    assert second.replication.port == 0


def test_slaves_have_their_own_directories_and_ports() -> None:
    settings = {"storePathRootDir": "/d/store", "filterServerPort": "7000", "listenPort": "9100"}
    master = {**settings, "filterServerNums": "2", "brokerName": "b"}
    first, second = (parse({**master, **slave_changes(parse(master), number)}) for number in (1, 2))
    assert [each.identity.broker_name for each in (first, second)] == ["b", "b"]
    assert [each.identity.broker_id for each in (first, second)] == [1, 2]
    assert [str(each.directory) for each in (first, second)] == [
        "/d/store-slave1",
        "/d/store-slave2",
    ]
    assert [each.identity.port for each in (first, second)] == [9110, 9120]
    assert [each.filters.server_port for each in (first, second)] == [7002, 7004]
    anywhere = parse({"listenPort": "0", "filterServerNums": "1"})
    assert parse(slave_changes(anywhere, 1)).filters.server_port == 0


def test_name_server_listening_everywhere_is_reached_here() -> None:
    assert reachable("0.0.0.0:1") == "127.0.0.1:1"
    assert reachable("[::]:1") == "127.0.0.1:1"
    assert reachable("10.0.0.1:1") == "10.0.0.1:1"


# --- documentation --------------------------------------------------------------------------------


GUIDE = (ROOT / "docs" / "guide" / "commands.md").read_text()
COMMON = {"--nameserver", "--json"}
"""Every command for daily work has them; they are explained once."""


DAILY = ("cluster", "topic", "group", "offset", "message", "dlq", "transaction", "config")


@cache
def commands() -> dict[str, Command]:
    """Return every command by its words, those of groups included."""
    root = get_group(app)
    context = Context(root)
    found: dict[str, Command] = {}
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        if isinstance(command, TyperGroup):
            inner = ((f"{name} {sub}", command, sub) for sub in command.list_commands(context))
            found |= {words: group.commands[sub] for words, group, sub in inner}
        if not isinstance(command, TyperGroup) or command.invoke_without_command:
            found[name] = command
    return found


def section(words: str) -> str:
    """Return the guide's section for a command."""
    title = f"\n{'###' if ' ' in words else '##'} `turbopump {words}`\n"
    assert GUIDE.count(title) == 1, f"{words} has no section in docs/guide/commands.md"
    return re.split(r"^##", GUIDE.partition(title)[2], maxsplit=1, flags=re.MULTILINE)[0]


def options_of(command: Command) -> set[str]:
    found: set[str] = set()
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found - {"--help", "-h", "-y"}


@pytest.mark.parametrize("words", sorted(commands()))
def test_every_command_and_option_is_documented(words: str) -> None:
    command, text = commands()[words], section(words)
    known = COMMON if " " in words else set()
    # Options that all commands of a group share may be explained above them.
    above = section(words.split()[0])
    for option in options_of(command) - known:
        assert f"`{option}`" in text + above, f"{words} {option} is not in docs/guide/commands.md"
    for parameter in command.params:
        if parameter.param_type_name == "argument" and words.split()[0] in DAILY:
            shown = re.findall(r"\w+", parameter.metavar or str(parameter.name).upper())
            assert shown[0] in text, f"{words} {shown} is not in docs/guide/commands.md"
    rows = (line.split("|")[1] for line in text.splitlines() if line.startswith("| `-"))
    documented = {option for row in rows for option in re.findall(r"`(-[^`]+)`", row)}
    assert documented <= options_of(command), "documented, but missing"


@pytest.mark.parametrize("words", sorted(commands()))
def test_help_has_no_line_break_within_a_paragraph(words: str) -> None:
    """Typer joins the lines of the first paragraph only."""
    _, *others = (commands()[words].help or "").strip().split("\n\n")
    assert [each for each in others if "\n" in each.strip()] == []


def test_groups_and_common_options_are_documented() -> None:
    for name in SUB_APPS:
        assert f"\n## `turbopump {name}`\n" in GUIDE
    common = section_of_daily_work()
    for option in (*COMMON, "--dry-run", "--yes"):
        assert f"| `{option}`" in common
    for option in ("--install-completion", "--show-completion", "NAMESRV_ADDR"):
        assert option in common


def section_of_daily_work() -> str:
    return GUIDE.partition("\n## Commands for daily work\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "words", sorted(words for words in commands() if words.split()[0] in DAILY and " " in words)
)
def test_every_daily_command_has_the_common_options(words: str) -> None:
    options = options_of(commands()[words])
    assert options >= COMMON
    if "--yes" in options:
        assert "--dry-run" in options, "commands that ask for confirmation have a dry run"
    assert commands()[words].help


# --- groups of commands ---------------------------------------------------------------------------


def test_help_shows_groups_without_importing_them() -> None:
    modules = [module for module, _ in SUB_APPS.values()]
    program = f"""
import sys
from typer.testing import CliRunner
from turbopump.cli.app import SUB_APPS, add_lazily, app
result = CliRunner().invoke(app, ["--help"])
assert result.exit_code == 0, result.output
assert all(name in result.stdout for name in {list(SUB_APPS)!r}), result.stdout
found = [name for name in {modules!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_groups_are_light_to_import() -> None:
    """A completion imports one, on every key press that requests it."""
    heavy = ("numpy", "uvloop", "asyncio", "rich.console", "turbopump.client", "turbopump.admin")
    program = f"""
import sys
from importlib import import_module
for name in {[module for module, _ in SUB_APPS.values()]!r}:
    import_module(name)
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_group_without_a_command_shows_its_help() -> None:
    result = run("topic")
    assert "create" in result.output
    unknown = run("topic", "crate")
    assert unknown.exit_code == 2
    assert "create" in unknown.stderr


def test_group_of_another_module_is_added_lazily() -> None:
    own = typer.Typer()
    own.callback()(lambda: None)
    add_lazily(own, "missing", "turbopump.cli.not_there", "A group that cannot be imported.")
    result = CliRunner().invoke(own, ["--help"])
    assert (result.exit_code, "cannot be imported" in result.stdout) == (0, True)
    result = CliRunner().invoke(own, ["missing", "x"])
    assert isinstance(result.exception, ModuleNotFoundError)
