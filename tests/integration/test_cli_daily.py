"""The commands for daily work, against two brokers on real sockets, with output snapshots."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shells import GUIDE, Shell, masked, wait_for
from turbopump import (
    ClientConfig,
    ConsumeResult,
    Message,
    PushConsumer,
    TransactionProducer,
    TransactionState,
)
from turbopump.admin import Admin
from turbopump.testing import running_server


def give_up(nameserver: str, group: str, topic: str, count: int) -> None:
    """Dead-letter messages of a group."""
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
            max_attempts=0,
        ),
        Admin(nameserver) as admin,
    ):
        letters = f"%DLQ%{group}"
        wait_for(lambda: letters in admin.topics.names())
        wait_for(lambda: admin.topics.status(letters).messages == count)


@pytest.mark.slow
def test_transactions_that_stay_open(tmp_path: Path) -> None:
    settings = {
        "transactionCheckInterval": "100",
        "transactionTimeOut": "0",
        "transactionCheckMax": "2",
    }
    with running_server(tmp_path, settings) as server:
        shell = Shell(server.nameserver)
        assert shell.ok("transaction list") == "No open transactions.\n"
        shell.ok("topic create orders")
        asked = []

        def check(message: Any) -> TransactionState:
            asked.append(message)
            return TransactionState.UNKNOWN

        with TransactionProducer("shop", check=check, nameserver=server.nameserver) as producer:
            message = Message("orders", b"an order", keys=["k1"])
            producer.send_in_transaction(message, lambda _: TransactionState.UNKNOWN)
            wait_for(lambda: shell.json_lines("transaction list --abandoned") != [])
            row = shell.json("transaction list --group shop")
            assert (row["state"], row["checks"], row["group"]) == ("abandoned", 2, "shop")
            assert (row["topic"], row["keys"], row["body"]) == ("orders", ["k1"], "an order")
            assert 0 <= row["age_ms"] < 60_000
            assert shell.json_lines("transaction list --group others") == []
            shown = shell.ok(f"transaction show {row['message_id']}")
            assert re.search(r"^checks +2$", shown, re.MULTILINE)
            assert re.search(r"^producer group +shop$", shown, re.MULTILINE)
            assert shell.json(f"transaction show {row['offset_id']}") | {"age_ms": 0} == row | {
                "age_ms": 0
            }
            refused = shell.run("transaction resume --all")
            assert (refused.exit_code, "--yes" in refused.stderr) == (2, True)
            assert shell.run("transaction resume").exit_code == 2
            assert shell.json("transaction resume --all --dry-run")["outcome"] == "would be resumed"
            missing = shell.run("transaction resume nothing")
            assert (missing.exit_code, "has the id nothing" in missing.stderr) == (1, True)
            before = len(asked)
            assert "resumed" in shell.ok(f"transaction resume {row['message_id']}")
            wait_for(lambda: len(asked) == before + 2)
            assert shell.run("transaction show nothing").exit_code == 1


# --- a day's work, as it looks --------------------------------------------------------------------


@pytest.mark.slow
def test_day_of_work_looks_as_it_did(tmp_path: Path) -> None:
    """Topics, messages and groups of a new cluster."""
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
    assert (refused.exit_code, "already exists; pass --force" in refused.stderr) == (2, True)
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
    assert shell.json("dlq delete ledger --dry-run") == {
        "group": "ledger",
        "letters": 3,
        "dry_run": True,
    }
    assert "Delete 3 dead letters of group ledger?" in shell.run("dlq delete ledger").stderr
    assert shell.ok("dlq list ledger").count("payments") == 3
    assert shell.ok("dlq delete ledger --yes") == "Deleted 3 dead letters of group ledger.\n"
    assert "no matching" in shell.ok("dlq list ledger")
    assert shell.ok("dlq delete ledger --yes") == "Group ledger has no dead letters.\n"


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
        client=ClientConfig(shell.nameserver, persist_interval=0.2),
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
        assert found["differences"] == []
        with PushConsumer(
            "readers",
            note,
            client=ClientConfig(shell.nameserver, instance="other"),
            subscriptions={"events": "paid"},
        ):
            differences = shell.json("group members readers")["differences"]
            rows = {(row["topic"], row["kind"], row["expression"]) for row in differences}
            assert rows == {("events", "TAG", "*"), ("events", "TAG", "paid")}
            text = shell.ok("group members readers")
            assert "Members have different subscriptions, so messages are skipped:" in text
            assert f"  events: TAG * by {member['client_id']}\n" in text
            (listed,) = [row for row in shell.json_lines("group list") if row["group"] == "readers"]
            assert not listed["is_consistent"]
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
        assert "Would give" in shell.ok(f"{consume} --dry-run")
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


def test_tail_filters_by_sql(shell: Shell) -> None:
    shell.ok("topic create priced --queues 1 --broker a")
    for amount in (50, 150):
        shell.ok(f"message send priced {amount} --property amount={amount}")
    lines = shell.json_lines("message tail priced --from earliest --no-follow --sql 'amount > 99'")
    assert [line["body"] for line in lines] == ["150"]
    wrong = shell.run("message tail priced --sql 'amount ! 5'")
    assert wrong.exit_code == 2
    assert "(at character 8)" in wrong.output
    assert "write 'a || b'" in shell.run("message tail priced --tags 'a | b'").output
    assert "specify --tags or --sql" in shell.run("message tail priced --tags a --sql a=1").output


@pytest.mark.slow
def test_tail_exits_cleanly_when_interrupted(shell: Shell) -> None:
    shell.ok("topic create long --queues 1 --broker a")
    for _ in range(2):
        shell.ok("message send long news")
    command = [sys.executable, "-m", "turbopump", "message", "tail", "long", "--last", "2"]
    env = {**os.environ, "NAMESRV_ADDR": shell.nameserver}
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


# --- what the guide shows -------------------------------------------------------------------------


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
