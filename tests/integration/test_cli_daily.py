"""The commands for daily work, against two brokers on real sockets; their output is kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from turbopump import ClientConfig, ConsumeResult, PushConsumer, Retries
from turbopump.admin.blocking import Admin
from turbopump.cli import administration, output
from turbopump.cli.app import app
from turbopump.testing import running_server

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "TURBOPUMP_UPDATE_SNAPSHOTS"
"""Set to 1, tests write what they see in place of comparing it."""

_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"), "YYYY-MM-DDThh:mm:ss"),
    (re.compile(r"127\.0\.0\.1:\d{5}"), "127.0.0.1:PPPPP"),
    (re.compile(r"\b[0-9A-F]{32}\b"), "I" * 32),
    (re.compile(r"\b[0-9A-F]{16}\b"), "I" * 16),
    (re.compile(r"(?<=V4_9_8).*$", re.MULTILINE), "  FIGURES"),
    (re.compile(r", \d+m?s late"), ", TIME late"),
)
_DELAY = re.compile(r" +\d+m?s(?= )")
"""Of a column as wide as its title, so whatever it says it takes the same room."""


@pytest.fixture(scope="module")
def nameserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("daily"), brokers=("a", "b")) as server:
        address = server.nameserver
        yield address


class Shell:
    """Runs commands as somebody would type them."""

    def __init__(self, nameserver: str) -> None:
        self.nameserver = nameserver
        self.lines: list[str] = []

    def run(self, line: str, stdin: str | bytes | None = None) -> Result:
        env = {"TURBOPUMP_NAMESERVER": self.nameserver, "COLUMNS": "80"}
        return CliRunner().invoke(app, shlex.split(line), input=stdin, env=env)

    def ok(self, line: str, stdin: str | bytes | None = None) -> str:
        result = self.run(line, stdin)
        assert result.exit_code == 0, (line, result.stderr, result.exception)
        return result.stdout

    def json(self, line: str) -> Any:
        """Return the one object that a command prints."""
        (found,) = self.json_lines(line)
        return found

    def json_lines(self, line: str) -> list[Any]:
        """Return the objects that a command prints, all of whose keys are documented."""
        found = [json.loads(text) for text in self.ok(f"{line} --json").splitlines()]
        words = " ".join(line.split()[:2])
        if words != "cluster info":
            for value in found:
                assert keys_of(value) <= documented_keys(words), words
        return found

    def keep(self, line: str, stdin: str | bytes | None = None) -> None:
        """Run a command and note what it printed."""
        result = self.run(line, stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), line
        self.lines += [f"$ turbopump {line}", *result.output.splitlines()]
        if result.exit_code:
            self.lines.append(f"[exit {result.exit_code}]")
        self.lines.append("")

    def compare(self, name: str) -> None:
        """Compare everything that was kept with what was printed when it was right."""
        text = masked("\n".join(self.lines))
        path = SNAPSHOTS / f"{name}.txt"
        if os.environ.get(UPDATE) == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{UPDATE}=1 writes {path} anew"


def masked(text: str) -> str:
    """Replace what differs from run to run by something of the same width."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return _DELAY.sub(lambda found: "TIME".rjust(len(found[0])), text)


@pytest.fixture
def shell(nameserver: str) -> Shell:
    return Shell(nameserver)


def give_up(nameserver: str, group: str, topic: str, count: int) -> None:
    """Let a group make dead letters of messages."""
    seen = []

    def fail(messages: Any, context: Any) -> ConsumeResult:
        seen.extend(messages)
        return ConsumeResult.RETRY_LATER

    with (
        PushConsumer(
            group,
            fail,
            nameserver=nameserver,
            subscriptions={topic: "*"},
            start_from="first",
            retries=Retries(attempts_max=0),
        ),
        Admin(nameserver) as admin,
    ):
        letters = f"%DLQ%{group}"
        wait_for(lambda: letters in admin.topics.names())
        wait_for(lambda: admin.topics.status(letters).messages == count)


def wait_for(fact: Any, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, "not so in time"
        time.sleep(0.02)


# --- a day's work, as it looks --------------------------------------------------------------------


@pytest.mark.slow
def test_day_of_work_looks_as_it_did(tmp_path: Path) -> None:
    """Topics, messages and groups of a cluster that is new."""
    with running_server(tmp_path, brokers=("a", "b")) as server:
        nameserver = server.nameserver
        day_of_work(Shell(nameserver))


def day_of_work(shell: Shell) -> None:
    shell.keep("topic list")
    shell.keep("topic create orders --queues 2")
    shell.keep("topic create orders")
    shell.keep("topic update orders --queues 3 --broker b --dry-run")
    shell.keep("topic route orders")
    shell.keep("topic route order")
    shell.keep("message send orders 'first order' --queue a:0 --tag created --key 1")
    shell.keep("message send orders - --queue b:1 --tag paid --property colour=red", "second")
    shell.keep("message send orders third --queue 1")
    shell.keep("topic status orders")
    shell.keep("topic list")
    shell.keep("group create billing --retries 3")
    shell.keep("group update billing --retries 5 --no-broadcast")
    shell.keep("group list")
    shell.keep("offset reset billing orders --to-offset 1 --dry-run")
    shell.keep("offset reset billing orders --to-earliest")
    shell.keep("offset reset billing orders --to-earliest --yes")
    shell.keep("group progress billing")
    shell.keep("offset reset billing orders --to-offset 1 --queue a:0 --yes")
    shell.keep("offset clone billing audit --dry-run")
    shell.keep("offset clone billing audit --create --dry-run")
    shell.keep("offset clone billing audit --create --yes")
    shell.keep("offset skip billing orders --yes")
    shell.keep("group progress billing")
    shell.keep("group progress")
    shell.keep("group members billing")
    shell.keep("group inspect billing")
    shell.keep("topic groups orders")
    shell.keep("message query orders --key 1")
    shell.keep("message query orders --queue b:1 --offset 0")
    shell.keep("message query orders --since 1h --tags paid")
    shell.keep("message query orders --key nothing")
    shell.keep("message tail orders --from earliest --no-follow")
    shell.keep("message tail orders --last 1 --no-follow")
    shell.keep("group delete billing --dry-run")
    shell.keep("group delete billing --yes")
    shell.keep("group progress billing")
    shell.keep("topic delete orders --dry-run")
    shell.keep("topic delete orders")
    shell.keep("topic delete orders --yes")
    shell.keep("topic status orders")
    shell.compare("day_of_work")


def test_clusters_and_settings_look_as_they_did(shell: Shell) -> None:
    shell.keep("cluster list")
    shell.keep("cluster status DefaultCluster")
    shell.keep("cluster status nowhere")
    shell.keep("cluster drain a --dry-run")
    shell.keep("config broker a fileReservedTime deleteWhen")
    shell.keep("config broker a fileReservedTim")
    shell.keep("config update-broker fileReservedTime=48 --dry-run")
    shell.keep("config update-broker fileReservedTime=48 --broker b --yes")
    shell.keep("config update-broker fileReservedTime=48 --broker b --yes")
    shell.keep("config update-broker fileReservedTime=x --yes")
    shell.keep("config update-broker nonsense")
    shell.keep("config update-broker nonsense=1 --yes")
    shell.keep("config nameservers orderMessageEnable")
    shell.keep("config update-nameservers orderMessageEnable=true --yes")
    shell.keep("config kv shop")
    shell.keep("config put-kv shop colour red")
    shell.keep("config kv shop colour")
    shell.keep("config delete-kv shop colour --dry-run")
    shell.keep("config delete-kv shop colour --yes")
    shell.keep("config kv shop colour")
    shell.compare("clusters_and_settings")
    shell.ok("config update-broker fileReservedTime=72 --yes")


@pytest.mark.slow
def test_dead_letters_look_as_they_did(shell: Shell, tmp_path: Path) -> None:
    shell.ok("topic create payments --queues 1 --broker a")
    for number in range(3):
        tag = "odd" if number % 2 else "even"
        shell.ok(f"message send payments 'payment {number}' --tag {tag} --key k{number}")
    give_up(shell.nameserver, "ledger", "payments", 3)
    (first, *_) = sorted(shell.json_lines("dlq list ledger"), key=lambda row: row["body"])
    shell.keep("dlq list")
    shell.keep("dlq redrive ledger --tags odd --dry-run")
    shell.keep("dlq redrive ledger --tags odd")
    shell.keep("dlq redrive ledger --tags odd --yes")
    shell.keep("dlq redrive ledger --yes")
    shell.keep("dlq redrive ledger --yes")
    shell.keep("dlq redrive ledger --to nowhere --yes")
    shell.keep("dlq redrive ledger --key none --yes")
    shell.keep("dlq list nobody")
    shell.keep("dlq show ledger nonsense")
    shell.compare("dead_letters")
    listed = shell.ok("dlq list ledger")
    assert listed.count("payments") == 3
    shown = shell.ok(f"dlq show ledger {first['letter_id']}")
    assert re.search(r"^sent back +yes$", shown, re.MULTILINE)
    assert re.search(r"^body +payment 0$", shown, re.MULTILINE)
    path = tmp_path / "letters.jsonl"
    assert "3 dead letters" in shell.ok(f"dlq export ledger --output {path}")
    letters = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(letter["body"] for letter in letters) == [f"payment {n}" for n in range(3)]
    assert {letter["origin_topic"] for letter in letters} == {"payments"}
    assert shell.ok("dlq export ledger --key k1").count("\n") == 1
    refused = shell.run(f"dlq export ledger -o {path} --tags none")
    assert (refused.exit_code, "is there already: --force" in refused.stderr) == (2, True)
    assert len(path.read_text().splitlines()) == 3
    assert shell.json(f"dlq export ledger -o {path} --force")["letters"] == 3
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert shell.json_lines("dlq list")[0]["group"] == "ledger"
    assert shell.json(f"dlq show ledger {first['letter_id']}")["is_redriven"]
    done = shell.json_lines("dlq redrive ledger --to retry --again --dry-run")
    assert [row["topic"] for row in done] == ["%RETRY%ledger"] * 3
    unknown = shell.run(f"dlq redrive ledger --id nope --id {first['letter_id']} --yes")
    assert (unknown.exit_code, unknown.stdout) == (1, "1 sent before\n")
    assert "has the id nope" in unknown.stderr
    shell.ok("topic delete payments --yes")
    gone = shell.run("dlq redrive ledger --yes")
    assert (gone.exit_code, gone.stdout) == (1, "3 origin gone\n")
    assert "--create-topic" in gone.stderr
    assert shell.ok("dlq redrive ledger --create-topic --yes") == "3 sent\n"


# --- running groups -------------------------------------------------------------------------------


@pytest.mark.slow
def test_running_group_is_shown_and_reset(shell: Shell) -> None:
    shell.ok("topic create events --queues 2")
    for number in range(4):
        shell.ok(f"message send events 'event {number}' --queue {'ab'[number % 2]}:0")
    bodies: list[bytes] = []

    def note(messages: Any, context: Any) -> ConsumeResult:
        bodies.extend(message.body for message in messages)
        return ConsumeResult.SUCCESS

    with PushConsumer(
        "readers",
        note,
        client=ClientConfig(shell.nameserver, persist_interval_ms=200),
        subscriptions={"events": "*"},
        start_from="first",
    ):
        wait_for(lambda: len(bodies) == 4)
        found = shell.json("group members readers")
        (member,) = found["members"]
        assert len([queue for queue in member["queues"] if queue.startswith("events@")]) == 4
        assert found["subscriptions"]["events"] == "*"
        assert member["language"] == "PYTHON"
        text = shell.ok("group members readers")
        assert "1 members, clustering" in text
        inside = shell.json("group inspect readers --stacks")
        assert inside["client_id"] == member["client_id"]
        assert "Thread" in inside["stacks"]
        assert {row["topic"] for row in inside["queues"]} >= {"events"}
        assert inside["client_id"] in shell.ok("group inspect readers")
        (running,) = [
            row for row in shell.json_lines("group progress") if row["group"] == "readers"
        ]
        assert running["is_running"]
        (sent,) = shell.json_lines("message query events --queue b:0 --offset 1")
        consume = f"message consume {sent['offset_id']} --group readers"
        assert "would get" in shell.ok(f"{consume} --dry-run")
        assert shell.json(f"{consume} --yes")["result"] == "CR_SUCCESS"
        assert bodies.pop() == b"event 3"
        refused = shell.run("group delete readers --yes")
        assert refused.exit_code == 1
        assert "group 'readers' has 1 members" in refused.stderr
        assert "Stop its members first" in refused.stderr
        assert shell.run("offset clone readers readers --yes").exit_code == 1
        plan = shell.json("offset reset readers events --to-earliest --queue a:0 --yes")
        assert plan["is_running"]
        wait_for(lambda: len(bodies) == 6, 30)
        assert sorted(bodies[4:]) == [b"event 0", b"event 2"]
        wait_for(lambda: shell.json("group progress readers")["queues"])
        owners = shell.json("group progress readers --members")["queues"]
        assert {row["client_id"] for row in owners if row["topic"] == "events"} == {
            member["client_id"]
        }


@pytest.mark.slow
def test_tail_follows_until_the_count(shell: Shell) -> None:
    shell.ok("topic create news --queues 1 --broker a")
    with ThreadPoolExecutor() as pool, Admin(shell.nameserver) as admin:
        watching = admin.messages.tail("news")
        first = pool.submit(next, watching)
        wait_for(lambda: not first.done())
        while not first.done():
            shell.ok("message send news 'something new' --tag x")
        assert first.result().body == b"something new"
        watching.close()
    lines = shell.json_lines("message tail news --from earliest --tags x --count 1")
    assert [line["body"] for line in lines] == ["something new"]


@pytest.mark.slow
def test_tail_ends_well_when_interrupted(shell: Shell) -> None:
    shell.ok("topic create long --queues 1 --broker a")
    for _ in range(2):
        shell.ok("message send long news")
    command = [sys.executable, "-m", "turbopump", "message", "tail", "long", "--last", "2"]
    env = {**os.environ, "TURBOPUMP_NAMESERVER": shell.nameserver}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            for _ in range(2):
                assert process.stdout.readline().endswith("news\n")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


# --- forms ----------------------------------------------------------------------------------------


def process(
    shell: Shell, *arguments: str | bytes, encoding: str = "utf-8"
) -> subprocess.Popen[bytes]:
    """Run a command as a process of its own, whose output is as its surroundings want it."""
    env = {**os.environ, "TURBOPUMP_NAMESERVER": shell.nameserver, "PYTHONIOENCODING": encoding}
    return subprocess.Popen(
        [sys.executable, "-m", "turbopump", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )


@pytest.mark.slow
def test_who_reads_no_further_ends_a_command_quietly(shell: Shell) -> None:
    shell.ok("topic create unread --queues 1 --broker a")
    for line in ("message tail unread --from earliest --count 1", "config broker a"):
        shell.ok("message send unread x")
        with process(shell, *line.split()) as command:
            assert command.stdout is not None
            assert command.stderr is not None
            command.stdout.close()
            assert command.wait(20) == 141, line
            assert command.stderr.read() == b"", line


@pytest.mark.slow
def test_everything_is_printed_whatever_the_encoding(shell: Shell) -> None:
    shell.ok("topic create words --queues 1 --broker a")
    shell.ok("message send words 'ä € \U0001f600' --tag é")
    words = ["message", "query", "words", "--since", "1h"]
    with process(shell, *words, encoding="latin-1") as command:
        out, err = command.communicate(timeout=20)
        assert (command.returncode, err) == (0, b"")
        assert b"\xe4 \\u20ac \\U0001f600" in out
    with process(shell, *words, "--json", encoding="latin-1") as command:
        out, _ = command.communicate(timeout=20)
        assert json.loads(out)["body"] == "ä € \U0001f600"


def test_delayed_message_is_told_as_such(shell: Shell) -> None:
    shell.ok("topic create later --queues 1 --broker a")
    said = shell.ok("message send later x --delay-level 3")
    assert re.search(r"is stored, and comes to later@a:0 after 10s\.$", said)
    assert shell.json("message send later x --delay-level 18")["offset"] is None
    assert "after 1s" in shell.ok("message send much-later x --delay-level 1 --create-topic")
    for topic in ("later", "later-still --create-topic"):
        refused = shell.run(f"message send {topic} --delay-level 19 --", "x")
        assert refused.exit_code == 2
        assert "delay level is 19: 1 to 18 is allowed on broker a, for 1s, 5s," in refused.stderr
    assert shell.run("message send nowhere x --delay-level 1").exit_code == 1


@pytest.mark.slow
def test_bytes_that_are_no_text_are_a_body_and_nothing_else(shell: Shell) -> None:
    shell.ok("topic create bytes --queues 1 --broker a")
    with process(shell, "message", "send", "bytes", b"\xff\xfe") as command:
        _, err = command.communicate(timeout=20)
        assert (command.returncode, err) == (0, b"")
    (found,) = shell.json_lines("message query bytes --since 1h")
    assert found["body_base64"] == "//4="
    for arguments in (("--tag", b"\xff"), ("--key", b"\xff"), ("--property", b"p=\xff")):
        with process(shell, "message", "send", "bytes", "x", *arguments) as command:
            _, err = command.communicate(timeout=20)
            assert command.returncode == 2, err
            assert b"is not UTF-8" in err
            assert b"Traceback" not in err


@pytest.mark.slow
def test_json_of_everything_can_be_read(shell: Shell) -> None:
    shell.ok("topic create forms --queues 1 --broker a")
    sent = shell.json("message send forms äöü --key k --property p=v")
    assert sent["status"] == "OK"
    (found,) = shell.json_lines("message query forms --key k")
    assert (found["body"], found["keys"], found["properties"]["p"]) == ("äöü", ["k"], "v")
    assert shell.json(f"message show {sent['message_id']} --topic forms") == found
    assert shell.json(f"message show {sent['offset_id']}") == found
    raw = CliRunner().invoke(
        app,
        ["message", "send", "forms", "-", "--nameserver", shell.nameserver],
        input=b"\xff\x00",
    )
    assert raw.exit_code == 0, raw.stderr
    last = shell.json_lines("message tail forms --last 1 --no-follow")[0]
    assert (last["body"], last["body_base64"]) == (None, "/wA=")
    progress = shell.json("group progress TOOLS_CONSUMER")
    assert progress["lag"] == 0
    assert {row["topic"] for row in shell.json_lines("topic list")} >= {"forms"}
    assert {row["kind"] for row in shell.json_lines("topic list --all")} >= {"normal", "system"}
    assert len(shell.json_lines("cluster status")) == 2
    assert shell.json("cluster info a")["brokerVersionDesc"] == "V4_9_8"
    shell.json("group create forms")
    shell.json("group update forms --retries 2")
    assert shell.json("offset reset forms forms --to-offset 1 --yes")["skips"] == 1
    assert shell.json("offset skip forms forms --dry-run")["skips"] == 1
    assert len(shell.json("offset clone forms others --create --yes")["queues"]) == 1
    assert shell.json("group progress forms")["lag"] == 1
    assert shell.json("group members forms")["members"] == []
    assert shell.json_lines("group producers nobody") == []
    assert {row["group"] for row in shell.json_lines("group list")} >= {"forms", "others"}
    assert {row["group"] for row in shell.json_lines("topic groups forms")} == {"forms", "others"}
    assert shell.json("topic route forms")["brokers"][0]["broker"] == "a"
    assert shell.json("topic status forms")["queues"][0]["max_offset"] == 2
    assert shell.json("topic update forms --queues 2 --dry-run")["dry_run"]
    assert shell.json("group delete forms --yes")["lag"] == 1
    assert shell.json_lines("config broker a listenPort")[0]["server"] == "a"
    assert len(shell.json_lines("config nameservers listenPort")) == 1
    shell.json_lines("config update-broker fileReservedTime=47 --dry-run")
    shell.json_lines("config update-nameservers orderMessageEnable=true --dry-run")
    shell.json("config put-kv forms k v")
    assert shell.json_lines("config kv forms") == [{"key": "k", "value": "v"}]
    shell.json("config delete-kv forms k --yes")
    shell.json("cluster drain a --dry-run")
    assert shell.json("cluster drain b --yes")["topics"] > 0
    assert shell.json("cluster restore b")["topics"] > 0
    assert len(shell.json_lines("cluster list")) == 2
    assert shell.json("topic delete forms --dry-run")["messages"] == 2
    assert shell.json("topic delete forms --yes")["brokers"] == ["a"]


def test_body_comes_from_a_file(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "body.bin"
    path.write_bytes(b"from a file")
    shell.ok("topic create files --queues 1 --broker a")
    shell.ok(f"message send files --file {path}")
    assert "from a file" in shell.ok("message tail files --from earliest --no-follow")
    both = shell.run(f"message send files text --file {path}")
    assert (both.exit_code, "one of the two" in both.stderr) == (2, True)
    missing = shell.run(f"message send files --file {path}.not")
    assert missing.exit_code == 1


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("offset reset g t", 2, "0 places to go to: one of --to-time"),
        ("offset reset g t --to-latest --to-offset 1", 2, "2 places to go to"),
        ("offset reset g t --to-time yesterday", 2, "time 'yesterday': 2026-03-01T12:00:00, 15m"),
        ("offset reset g t --to-offset -1", 2, "offset is -1"),
        ("message query t", 2, "0 ways to look: one of --key"),
        ("message query t --key a --unique-key b", 2, "2 ways to look"),
        ("message query t --queue 1", 2, "--queue and --offset: both"),
        ("message query t --key a --limit 0", 2, "limit is 0"),
        ("message tail t --from earliest --last 3", 2, "--from and --last"),
        ("message tail t --count 0", 2, "count is 0"),
        ("dlq list g --limit -1", 2, "limit is -1"),
        ("message tail t --from 99999999999999999999999", 2, "in the years 1 to 9999"),
        ("topic create t --queues 99999999", 2, "queues is 99999999: 1 to 65536"),
        ("message send t x --delay-level -1", 2, "delay level is -1"),
        ("topic update t", 2, "nothing to change is given"),
        ("group create g --retry-queues -1", 2, "retry_queues is -1: 0 to 1024"),
        ("message send t x --property nonsense", 2, "property 'nonsense': name=value"),
        ("message show 123", 1, "An id that a producer gave is found with --topic only"),
        ("topic create 'a b'", 2, "topic is 'a b'"),
        ("topic create t --permission x", 2, "permission is 'x'"),
        ("topic create t --broker nobody", 1, "no broker 'nobody'"),
        ("topic create t --cluster nobody", 1, "`turbopump cluster list` shows all"),
        ("topic delete nothing --yes", 1, "`turbopump topic create nothing` makes it"),
        ("group progress nobody", 1, "`turbopump group create nobody` makes it"),
        ("group create DEFAULT_CONSUMER", 2, "a name of your own"),
        ("config put-kv '' k v", 2, "namespace is ''"),
    ],
)
def test_bad_input_is_named_with_what_to_do(shell: Shell, line: str, code: int, said: str) -> None:
    result = shell.run(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in " ".join(result.stderr.split())


def test_advice_fits_what_was_asked(shell: Shell) -> None:
    shell.ok("topic create closed --queues 1 --permission w")
    shell.ok("message send closed x")
    missing = shell.run("message show 123 --topic closed").stderr
    assert "no message of topic 'closed' with id '123'" in missing
    assert "--topic only" not in missing
    refused = shell.run("message tail closed --from earliest --no-follow")
    assert refused.exit_code == 1
    assert "`topic update --permission`" in refused.stderr


def test_nobody_is_asked_where_nobody_sits(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.ok("topic create asked --queues 1 --broker a")
    refused = shell.run("topic delete asked")
    assert refused.exit_code == 2
    assert "add --yes to do it, or --dry-run" in refused.stderr
    monkeypatch.setattr(administration, "is_interactive", lambda: True)
    refused = shell.run("topic delete asked --json")
    assert refused.exit_code == 2
    refused = shell.run("topic delete asked", "n\n")
    assert refused.exit_code == 1
    assert "asked" in shell.ok("topic list")
    assert "is deleted" in shell.ok("topic delete asked", "y\n")


def test_tables_fit_80_columns_of_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = "wide-name-of-a-topic-that-goes-on-and-on"
    shell.ok(f"topic create {topic} --queues 1")
    shell.ok(f"message send {topic} 'a body of some length' --queue a:0 --tag created")
    shell.ok("group create wide-readers")
    shell.ok(f"offset reset wide-readers {topic} --to-earliest --yes")
    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is not sys.stderr)
    shell.keep(f"topic status {topic}")
    shell.keep(f"message query {topic} --since 1h")
    shell.keep("cluster status")
    shell.keep("group progress wide-readers")
    shell.compare("at_80_columns")
    printed = [line for line in shell.lines if not line.startswith("$")]
    assert max(map(len, printed)) <= 80
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    assert "a body of" in shell.ok(f"message query {topic} --since 1h"), "a bar is no obstacle"


def test_missing_name_server_is_reported_with_advice() -> None:
    result = CliRunner().invoke(app, ["topic", "list", "--nameserver", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no name server answers at 127.0.0.1:1" in result.stderr
    assert "turbopump standalone" in result.stderr
    assert "TURBOPUMP_NAMESERVER" in result.stderr
    result = CliRunner().invoke(app, ["topic", "list", "--nameserver", "nonsense"])
    assert (result.exit_code, "nonsense" in result.stderr) == (2, True)


def test_names_are_completed(shell: Shell) -> None:
    shell.ok("topic create completed --queues 1 --broker a")
    env = {
        "_TURBOPUMP_COMPLETE": "complete_bash",
        "COMP_WORDS": "turbopump topic status comple",
        "COMP_CWORD": "3",
        "TURBOPUMP_NAMESERVER": shell.nameserver,
    }
    result = CliRunner().invoke(app, [], env=env, prog_name="turbopump")
    assert result.stdout.split() == ["completed"]
    env["TURBOPUMP_NAMESERVER"] = "127.0.0.1:1"
    result = CliRunner().invoke(app, [], env=env, prog_name="turbopump")
    assert result.stdout.split() == []


# --- what the guide shows -------------------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "commands.md"


@pytest.mark.slow
def test_guide_shows_what_is_printed(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```console\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    with running_server(tmp_path) as server:
        nameserver = server.nameserver
        shell = Shell(nameserver)
        for line in shown.splitlines():
            if line.startswith("$ turbopump "):
                shell.keep(line.removeprefix("$ turbopump "))
    printed = "\n".join(line for line in shell.lines if line and not line.startswith("[exit"))
    assert masked(printed).split() == masked(shown).split()


def documented_keys(words: str) -> set[str]:
    """Return the keys that the guide names for a command's JSON."""
    guide = GUIDE.read_text()
    section = guide.partition(f"\n### `turbopump {words}`\n")[2].partition("\n##")[0]
    text = section[re.search(r"\bJSON\b", section).start() :]  # type: ignore[union-attr]
    keys = set(re.findall(r"`(\w+)`", text))
    message_keys = set(re.findall(r"`(\w+)`", paragraph(guide, "Messages have these keys")))
    letter_keys = set(re.findall(r"`(\w+)`", paragraph(guide, "of a message in JSON, and:")))
    if "messages." in text:
        keys |= message_keys
    if "letter" in text:
        keys |= message_keys | letter_keys
    return keys


def paragraph(guide: str, start: str) -> str:
    return guide.partition(start)[2].partition("\n\n")[0]


def keys_of(value: Any) -> set[str]:
    """Return all keys of a value, those of objects in lists and of before and after included."""
    found = set()
    for key, item in value.items():
        found.add(key)
        inner = item if isinstance(item, list) else [item] if key in {"before", "after"} else []
        for each in inner:
            found |= keys_of(each) if isinstance(each, dict) else set()
    return found
