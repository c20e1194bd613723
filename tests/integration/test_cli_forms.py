"""What all commands have in common: JSON, pipes, terminals, bad input, completion."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from servers import standalone
from shells import Shell
from turbopump.cli import administration, output
from turbopump.cli.app import app
from turbopump.testing import running_server


def process(
    shell: Shell, *arguments: str | bytes, encoding: str = "utf-8"
) -> subprocess.Popen[bytes]:
    """Run a command as a separate process, with output chosen by its environment."""
    env = {**os.environ, "NAMESRV_ADDR": shell.nameserver, "PYTHONIOENCODING": encoding}
    return subprocess.Popen(
        [sys.executable, "-m", "turbopump", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_quietly(shell: Shell) -> None:
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


def test_a_delayed_message_is_reported_as_delayed(shell: Shell) -> None:
    shell.ok("topic create later --queues 1 --broker a")
    said = shell.ok("message send later x --delay-level 3")
    assert re.search(r"^Stored \w+, to be delivered to later@a:0 after 10s\.$", said)
    assert shell.json("message send later x --delay-level 18")["offset"] is None
    assert "after 1s" in shell.ok("message send much-later x --delay-level 1 --create-topic")
    for topic in ("later", "later-still --create-topic"):
        refused = shell.run(f"message send {topic} --delay-level 19 --", "x")
        assert refused.exit_code == 2
        assert "delay level must be 1–18 on broker a, got 19; the levels are" in refused.stderr
    assert shell.run("message send nowhere x --delay-level 1").exit_code == 1
    assert shell.ok("message send later x --delay 5m").endswith(" after 5m.\n")
    assert shell.ok("message send later x --delay 61s").endswith(" after 2m.\n"), "rounded up"
    assert "after 1s" in shell.ok("message send even-later x --delay 1ms --create-topic")


@pytest.mark.slow
def test_a_message_stored_less_safely_than_promised_is_reported(tmp_path: Path) -> None:
    with standalone(tmp_path, {"brokerRole": "SYNC_MASTER"}) as server:
        sent = Shell(server.nameserver).run("message send orders x --create-topic")
    assert sent.exit_code == 1
    stored, status = sent.stdout.splitlines()
    assert stored.startswith("Stored ")
    assert status == (
        "SLAVE_NOT_AVAILABLE: no slave is connected and up to date, only the master has it."
    )


@pytest.mark.slow
def test_bytes_that_are_not_text_are_accepted_only_as_a_body(shell: Shell) -> None:
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
            assert b"must be UTF-8" in err
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
    assert (progress["lag"], progress["known_lag"], progress["queues"]) == (None, 0, [])
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
    assert (both.exit_code, "specify a body or --file" in both.stderr) == (2, True)
    missing = shell.run(f"message send files --file {path}.not")
    assert missing.exit_code == 1


def test_each_line_becomes_a_message(shell: Shell, tmp_path: Path) -> None:
    shell.ok("topic create lines --queues 2 --broker a")
    said = shell.ok("message send lines - --lines --tag t --sharding-key k", b"one\n\ntwo\r\n\xff")
    assert said == "Stored 3 messages in topic lines.\n"
    sent = shell.json_lines("message query lines --since 1h")
    assert [each["body"] for each in sent] == ["one", "two", None]
    assert {(each["tags"], each["queue_id"]) for each in sent} == {("t", sent[0]["queue_id"])}
    path = tmp_path / "lines.txt"
    path.write_text("three\nfour")
    (three, four) = shell.json_lines(f"message send lines --lines --queue 1 --file {path}")
    assert (three["queue_id"], four["offset"]) == (1, three["offset"] + 1)
    missing = shell.run("message send lines-of-nothing --lines", "x\n")
    assert (missing.exit_code, missing.stdout) == (1, "")
    too_long = shell.run("message send lines --lines", b"short\n\n" + bytes(5_000_000) + b"\nshort")
    assert (too_long.exit_code, too_long.stdout) == (2, "Stored 1 messages in topic lines.\n")
    assert "line 3: body must be 1–4194304 bytes, got 5000000" in too_long.stderr
    assert "at offset" in shell.ok("message send lines now --delay 0s")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(shell: Shell, closed: str) -> None:
    words = f"{sys.executable} -m turbopump message send no-streams x --create-topic {closed}"
    env = {**os.environ, "NAMESRV_ADDR": shell.nameserver}
    subprocess.run(["sh", "-c", words], env=env, check=True, timeout=20)
    lines = words.replace(" x ", " --lines ")
    subprocess.run(["sh", "-c", lines], env=env, check=True, timeout=20, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_lines_are_sent_as_they_come(shell: Shell) -> None:
    shell.ok("topic create stream --queues 1 --broker a")
    command = [sys.executable, "-m", "turbopump", "message", "send", "stream", "--lines", "--json"]
    env = {**os.environ, "NAMESRV_ADDR": shell.nameserver}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(2):
            print(f"line {number}", file=process.stdin, flush=True)
            assert json.loads(process.stdout.readline())["offset"] == number
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--json", "--watch=0.1"])
def test_a_status_is_watched_until_interrupted(shell: Shell, form: str) -> None:
    topic = f"watched{form.rpartition('-')[2][:4]}"
    shell.ok(f"topic create {topic} --queues 1 --broker a")
    words = ["topic", "status", topic, "--watch", "0.1", form]
    env = {**os.environ, "NAMESRV_ADDR": shell.nameserver}
    command = [sys.executable, "-m", "turbopump", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            empty = '"messages": 0' if form == "--json" else "0 messages in 1 queues."
            assert any(empty in line for line in process.stdout)
            shell.ok(f"message send {topic} x")
            assert any(
                empty.replace("0 ", "1 ").replace(" 0", " 1") in line for line in process.stdout
            )
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
            assert (process.returncode, said) == (0, "")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("offset reset g t", 2, "specify exactly one of --to-time"),
        ("offset reset g t --to-latest --to-offset 1", 2, "specify exactly one of --to-time"),
        ("offset reset g t --to-time yesterday", 2, "time must be now, 2026-03-01T12:00:00, 15m"),
        ("offset reset g t --to-offset -1", 2, "offset must be 0 or more, got -1"),
        ("message query t", 2, "specify exactly one of --key"),
        ("message query t --key a --unique-key b", 2, "specify exactly one of --key"),
        ("message query t --queue 1", 2, "specify both --queue and --offset"),
        ("message query t --key a --limit 0", 2, "limit must be at least 1, got 0"),
        ("message tail t --from earliest --last 3", 2, "specify --from or --last"),
        ("message tail t --count 0", 2, "count must be at least 1, got 0"),
        ("dlq list g --limit -1", 2, "limit must be at least 1, got -1"),
        ("message tail t --from 99999999999999999999999", 2, "in the years 1 to 9999"),
        ("topic create t --queues 99999999", 2, "queues must be 1–65536, got 99999999"),
        ("message send --create-topic t x --delay 3h", 2, "are 1s, 5s, 10s, 30s, 1m"),
        ("message send --create-topic t x --delay soon", 2, "duration must be 90s, 5m or the like"),
        ("message send --create-topic t x --delay 1m --delay-level 2", 2, "specify --delay or"),
        ("message send t x --lines", 2, "specify a body or --lines, not both"),
        ("cluster status --watch 0.01", 2, "--watch must be 0.1–86400, got 0.01"),
        ("cluster status --watch inf", 2, "--watch must be 0.1–86400, got inf"),
        (
            "config update-broker fileReservedTime=1 --replica x",
            2,
            "id of a broker, or all, got 'x'",
        ),
        (
            "config update-broker fileReservedTime=1 --replica 7",
            1,
            "no slave of any broker with id '7'",
        ),
        ("config broker a --replica 7", 1, "no slave of broker 'a' with id '7'"),
        ("config broker a aclEnable", 2, "has no setting 'aclEnable': not supported by Turbopump"),
        ("config nameservers nothing", 2, "has no setting 'nothing'"),
        ("topic status nothing --watch", 1, "there is no topic 'nothing'"),
        ("topic purge nothing --yes", 1, "there is no topic 'nothing'"),
        ("dlq delete nobody --yes", 1, "there is no group 'nobody'"),
        ("message send t x --delay-level -1", 2, "delay level must be 0 or more, got -1"),
        ("topic update t", 2, "nothing to change; specify"),
        ("group create g --retry-queues -1", 2, "retry_queues must be 0 to 1024, got -1"),
        ("message send t x --property nonsense", 2, "property must be name=value, got 'nonsense'"),
        ("message show 123", 1, "No topic has a message with this id"),
        ("topic create 'a b'", 2, "_-%|, got 'a b'"),
        ("topic create t --permission x", 2, "permission must be one of r, w, rw, got 'x'"),
        ("topic create t --broker nobody", 1, "no broker 'nobody'"),
        ("topic create t --cluster nobody", 1, "`turbopump cluster list` lists all"),
        ("topic delete nothing --yes", 1, "`turbopump topic create nothing` creates it"),
        ("group progress nobody", 1, "`turbopump group create nobody` creates it"),
        ("group create DEFAULT_CONSUMER", 2, "a name of your own"),
        ("config put-kv '' k v", 2, "namespace must not be blank, got ''"),
    ],
)
def test_bad_input_is_named_with_what_to_do(shell: Shell, line: str, code: int, said: str) -> None:
    result = shell.run(line)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in " ".join(result.stderr.split())


def test_advice_fits_the_command(shell: Shell) -> None:
    shell.ok("topic create closed --queues 1 --permission w")
    shell.ok("message send closed x")
    missing = shell.run("message show 123 --topic closed").stderr
    assert "no message of topic 'closed' with id '123'" in missing
    refused = shell.run("message tail closed --from earliest --no-follow")
    assert refused.exit_code == 1
    assert "`topic update --permission`" in refused.stderr


def test_no_confirmation_is_requested_without_a_terminal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.ok("topic create asked --queues 1 --broker a")
    refused = shell.run("topic delete asked")
    assert refused.exit_code == 2
    assert "pass --yes to proceed, or --dry-run" in refused.stderr
    monkeypatch.setattr(administration, "is_interactive", lambda: True)
    refused = shell.run("topic delete asked --json")
    assert refused.exit_code == 2
    refused = shell.run("topic delete asked", "n\n")
    assert refused.exit_code == 1
    assert "asked" in shell.ok("topic list")
    assert "Deleted topic asked." in shell.ok("topic delete asked", "y\n")


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
    assert "a body of" in shell.ok(f"message query {topic} --since 1h"), "the bar is harmless"


def test_missing_name_server_is_reported_with_advice() -> None:
    result = CliRunner().invoke(app, ["topic", "list", "--nameserver", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    first, advice = result.stderr.splitlines()
    assert first == "turbopump: no name server answers at 127.0.0.1:1: Connection refused"
    assert "turbopump standalone" in advice
    assert "NAMESRV_ADDR" in advice
    result = CliRunner().invoke(app, ["topic", "list", "--nameserver", "127.0.0.1:1;127.0.0.1:2"])
    assert re.search(
        r"no name server answers at 127\.0\.0\.1:1;127\.0\.0\.1:2: 127\.0\.0\.1:[12]: "
        r"Connection refused$",
        result.stderr,
        re.MULTILINE,
    )
    result = CliRunner().invoke(app, ["topic", "list", "--nameserver", "nonsense"])
    assert (result.exit_code, "nonsense" in result.stderr) == (2, True)


@pytest.fixture(scope="module")
def no_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with running_server(tmp_path_factory.mktemp("none"), brokers=()) as server:
        yield Shell(server.nameserver)


@pytest.mark.parametrize(
    "line",
    [
        "cluster status",
        "topic list",
        "topic status orders",
        "topic route orders",
        "topic create orders",
        "group list",
        "group progress billing",
        "message query orders --since 1h",
    ],
)
def test_without_brokers_nothing_is_said_to_be_missing(no_brokers: Shell, line: str) -> None:
    result = no_brokers.run(line)
    assert (result.exit_code, result.stdout) == (1, "")
    first, advice = result.stderr.splitlines()
    address = no_brokers.nameserver
    assert first == (
        f"turbopump: no broker answers: none is registered with the name servers at {address}"
    )
    assert "register every 30 s" in advice


def test_names_are_completed(shell: Shell) -> None:
    shell.ok("topic create completed --queues 1 --broker a")
    assert completions(shell.nameserver, "topic status comple") == ["completed"]
    assert completions("127.0.0.1:1", "topic status comple") == []


def completions(nameserver: str, words: str) -> list[str]:
    """Return what a shell offers for the last of some words, which may be empty."""
    env = {
        "_TURBOPUMP_COMPLETE": "complete_bash",
        "COMP_WORDS": f"turbopump {words}",
        "COMP_CWORD": str(len(words.split(" "))),
        "NAMESRV_ADDR": nameserver,
    }
    return CliRunner().invoke(app, [], env=env, prog_name="turbopump").stdout.split()


def test_groups_of_applications_are_completed(shell: Shell) -> None:
    shell.ok("group create complete-me")
    for line in ("group members ", "group progress "):
        found = completions(shell.nameserver, line)
        assert "complete-me" in found
        assert not {"TOOLS_CONSUMER", "CID_RMQ_SYS_TRANS", "FILTERSRV_CONSUMER"}.intersection(found)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("broker promote ", "a"),
        ("cluster info ", "a"),
        ("config broker ", "a"),
        ("topic create orders --broker ", "a"),
        ("transaction list --broker ", "a"),
        ("config update-broker --broker ", "a"),
        ("config broker a fileReserv", "fileReservedTime"),
        ("config update-broker fileReserv", "fileReservedTime="),
        ("config nameservers orderMess", "orderMessageEnable"),
        ("config update-nameservers orderMess", "orderMessageEnable="),
    ],
)
def test_brokers_and_settings_are_completed(shell: Shell, words: str, offered: str) -> None:
    assert offered in completions(shell.nameserver, words)


def test_queues_that_no_consumer_reads_cause_a_warning(shell: Shell) -> None:
    made = shell.run("topic create unreadable --queues 3 --read-queues 1 --broker a")
    assert made.exit_code == 0, made.stderr
    assert "warning: no consumer reads queues 1, 2 of topic unreadable on broker a" in made.stderr
    changed = shell.run("topic update unreadable --read-queues 2")
    assert "warning: no consumer reads queue 2 of topic unreadable on broker a" in changed.stderr
    changed = shell.run("topic update unreadable --read-queues 3")
    assert (changed.exit_code, changed.stderr) == (0, "")


def test_a_message_is_found_by_the_id_that_send_prints(shell: Shell) -> None:
    shell.ok("topic create known --queues 1 --broker a")
    message_id = shell.ok("message send known hello").split()[1]
    assert "hello" in shell.ok(f"message show {message_id}")


def test_changed_settings_report_whether_they_survive_a_restart(shell: Shell) -> None:
    changed = shell.ok("config update-broker fileReservedTime=49 --broker a --yes")
    assert "Changed until the next restart of a: started without a --config file" in changed
    (row,) = shell.json_lines("config update-broker fileReservedTime=48 --broker a --yes")
    assert (row["server"], row["broker_id"], row["is_stored"]) == ("a", 0, False)
    (place,) = [each for each in shell.json_lines("cluster list") if each["broker"] == "a"]
    assert row["address"] == place["address"]
