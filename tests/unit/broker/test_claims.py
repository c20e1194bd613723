"""Claims written to name servers that cannot compare: only soon after they were read."""

from __future__ import annotations

from turbopump.broker.replication.claims import SEND_MS, WRITE_MS, Claims
from turbopump.testing import virtual_time
from turbopump.testing.clock import VirtualClock
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.mastership import MasterClaim

MS_NS = 1_000_000
OWN = MasterClaim(epoch=2, token="c", master_address="10.0.0.3:10911", former_id=3, pending=True)
COMPARING, APACHE = "comparing:9876", "apache:9876"


class Servers:
    """A name server that compares and one that does not, each with one value."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.values = {COMPARING: "old", APACHE: "old"}
        self.write_ms = 0
        self.claims = Claims("broker-a", lambda: [COMPARING, APACHE], self.ask, self.clock)

    def advance(self, by_ms: int) -> None:
        self.clock.advance_ns(by_ms * MS_NS)

    async def ask(self, server: str, command: Command, timeout_ms: int) -> Command:
        assert timeout_ms > 0
        compares = server == COMPARING
        if command.code == RequestCode.GET_KV_CONFIG:
            value = headers.KvValue(value=self.values[server], compares=compares or None)
            return command.answer(ResponseCode.SUCCESS, value)
        self.advance(self.write_ms)
        entry = headers.KvEntry.from_ext_fields(command.ext_fields)
        if compares and entry.expected != self.values[server]:
            return command.answer(ResponseCode.KV_VALUE_DIFFERS)
        self.values[server] = entry.value
        return command.answer(ResponseCode.SUCCESS)


@virtual_time()
async def test_a_broker_that_was_suspended_replaces_no_newer_claim() -> None:
    servers = Servers()
    found = await servers.claims.read()
    servers.advance(SEND_MS + 1)
    newer = {COMPARING: "newer", APACHE: "newer"}
    servers.values.update(newer)
    problems = await servers.claims.write(OWN, found)
    assert servers.values == newer
    assert problems[APACHE] == "took too long"
    assert "another promotion is under way" in problems[COMPARING]


@virtual_time()
async def test_a_slow_write_counts_only_where_values_are_compared() -> None:
    servers = Servers()
    found = await servers.claims.read()
    servers.advance(SEND_MS)
    servers.write_ms = WRITE_MS
    assert await servers.claims.write(OWN, found) == {APACHE: "took too long"}
    assert set(servers.values.values()) == {OWN.encode().decode()}


@virtual_time()
async def test_a_write_in_time_counts_everywhere() -> None:
    servers = Servers()
    found = await servers.claims.read()
    servers.advance(SEND_MS)
    assert await servers.claims.write(OWN, found) == {}
