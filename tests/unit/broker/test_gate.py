"""Only `broker/message_writer.py` stores messages, and only the gate acknowledges them."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from brokers import running_broker, shut_gate
from imports import SOURCE, calls, mentioning, name_of
from transaction_peers import COMMIT, ROLLBACK, world
from turbopump.broker.replies import Replies
from turbopump.errors import RequestTimeout
from turbopump.testing import virtual_time
from turbopump.wire.bodies import GroupConfig
from unit.broker.test_acknowledgements import ASK

SERVERS = ("broker", "nameserver", "admin", "client", "cli", "testing")


def callers(*names: str) -> set[str]:
    """Return the modules of servers and clients that call a function with one of these names."""
    return {
        name_of(path)
        for path in mentioning(names, *SERVERS)
        for called, _ in calls(path)
        if called in names
    }


def test_only_one_module_appends_to_the_store() -> None:
    appends = [
        f"{owner}{call}"
        for owner in ("store.", "self.store.", "self._store.", "broker.store.")
        for call in ("append",)
    ]
    assert callers(*appends) == {"broker/message_writer.py"}


def test_only_one_module_uses_the_gate() -> None:
    asked = [
        f"{owner}{call}"
        for owner in ("", "durability.", "self._durability.")
        for call in ("acknowledge", "acknowledge_all")
    ]
    assert callers(*asked) == {"broker/message_writer.py"}


@pytest.mark.parametrize("method", ["settle", "when_settled"])
def test_appends_pass_through_the_gate(method: str) -> None:
    tree = ast.parse((SOURCE / "broker" / "message_writer.py").read_text())
    [function] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    assert names & {"acknowledge", "acknowledge_all"}


def test_only_the_store_reports_an_append() -> None:
    makers = {
        name_of(path)
        for path in mentioning(["Appended"])
        for called, _ in calls(path)
        if called == "Appended"
    }
    assert makers
    assert all(name.startswith("store/") for name in makers)


@pytest.mark.parametrize("what", ASK)
def test_a_shut_gate_lets_no_success_through(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pushed(*_: object) -> None:
        return None

    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            await broker.state.groups.update(GroupConfig(group_name="g"))
            await client.send(b"fails")
            [failed] = await client.messages()
            stored = broker.store.written_end
            with shut_gate(), pytest.raises(RequestTimeout):
                await ASK[what](client, failed)
            await asyncio.sleep(0)
            assert broker.store.written_end > stored, "stored, but no sender was notified"

    monkeypatch.setattr(Replies, "_push", pushed)
    run()


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@virtual_time()
async def test_a_shut_gate_lets_no_end_of_a_transaction_through(
    tmp_path: Path, decision: int
) -> None:
    async with world(tmp_path) as (broker, _, producer):
        place = await producer.half()
        stored = broker.store.written_end
        with shut_gate(), pytest.raises(RequestTimeout):
            await producer.end(place, decision)
        assert broker.store.written_end > stored, "stored, but no sender was notified"
