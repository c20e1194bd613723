"""A master and its slaves in virtual time, with replication running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from clusters import Cluster
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, Role
from turbopump.broker.replication.slave import LinkState
from turbopump.message import Message, PhysicalOffset
from turbopump.testing import broker_config
from turbopump.testing.cluster import _Place

MASTER = "a"
SEGMENT_BYTES = 70_000
SMALL_LOG = {"mappedFileSizeCommitLog": str(SEGMENT_BYTES), "maxMessageSize": "1000"}
"""Log files small enough for a test to fill."""


class LogReplicas(Cluster):
    """Broker ``a`` as master, with slaves ``a-1``, ``a-2`` and so on."""

    roles: dict[str, Role]
    """Overrides by name; by default, the master has its configured role and others are SLAVE."""

    def _config_of(self, name: str, place: _Place) -> BrokerConfig:
        config = super()._config_of(name, place)
        if name == MASTER:
            return config
        broker_id = int(name.removeprefix(f"{MASTER}-"))
        identity = replace(
            config.identity, broker_name=MASTER, broker_id=broker_id, role=Role.SLAVE
        )
        return replace(config, identity=identity)

    @property
    def master(self) -> Broker:
        return self.broker(MASTER)

    def slave(self, number: int = 1) -> Broker:
        return self.broker(f"{MASTER}-{number}")

    @property
    def slaves(self) -> list[Broker]:
        return [broker for name, broker in self.brokers.items() if name != MASTER]

    async def fill(self, count: int, body_bytes: int = 800, text: str = "m") -> None:
        """Send messages of the given size."""
        bodies = (f"{text}-{number}".encode().ljust(body_bytes, b".") for number in range(count))
        await self.send(*(Message("T", body) for body in bodies))

    def has_copied(self, *slaves: Broker) -> bool:
        """Whether the slaves have the master's whole log and have acknowledged it."""
        end = self.master.store.readable_end
        known = [slave.acknowledged for slave in self.master.replication.slaves.following]
        chosen = slaves or tuple(self.slaves)
        return known.count(end) >= len(chosen) and all(
            slave.store.readable_end == end for slave in chosen
        )

    async def until_copied(self, *slaves: Broker) -> None:
        await self.until(lambda: self.has_copied(*slaves))
        for slave in slaves or self.slaves:
            assert_same_log(self.master, slave)


def log_bytes(broker: Broker, start: PhysicalOffset) -> bytes:
    """Return a broker's log from a position on."""
    parts, position = [], start
    while (part := broker.store.raw(position, 1 << 20)) is not None:
        parts.append(bytes(part))
        position = PhysicalOffset(position + len(part))
    return b"".join(parts)


def assert_same_log(master: Broker, slave: Broker) -> None:
    """Compare the bytes of the logs, and the messages that the queues refer to."""
    start = max(master.store.min_offset, slave.store.min_offset)
    assert log_bytes(master, start) == log_bytes(slave, start)
    for topic, queue_id in master.store.queue_ids():
        first, end = master.store.queue_range(topic, queue_id)
        low, high = slave.store.queue_range(topic, queue_id)
        assert high == end
        assert start > master.store.min_offset or low == first


def link(slave: Broker) -> LinkState:
    follower = slave.replication.follower
    assert follower is not None
    return follower.status.state


@asynccontextmanager
async def log_replicas(
    directory: Path, slaves: int = 1, settings: dict[str, str] | None = None
) -> AsyncIterator[LogReplicas]:
    """Run a name server, a master and slaves; ``settings`` apply to all brokers."""
    names = (MASTER, *(f"{MASTER}-{number + 1}" for number in range(slaves)))
    config = broker_config({**SMALL_LOG, **(settings or {})})
    async with LogReplicas(directory, names, config=config, skips_idle_time=False) as made:
        yield made
