"""A master and a slave in virtual time; a test can trigger each copy, so that the slave lags."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import brokers
from clusters import Cluster
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, Role
from turbopump.testing import LinkQuality
from turbopump.testing.cluster import _Place

MASTER, SLAVE = "a", "a-slave"
SLAVE_ID = 1
_MASTER_HOST, _SLAVE_HOST = "10.0.0.1", "10.0.0.2"


class Replicas(Cluster):
    """Broker ``a`` as master and as slave."""

    is_linked = False
    """Whether the slave replicates automatically."""

    def _config_of(self, name: str, place: _Place) -> BrokerConfig:
        config = super()._config_of(name, place)
        if name != SLAVE:
            return config
        identity = replace(config.identity, broker_name=MASTER, broker_id=SLAVE_ID, role=Role.SLAVE)
        return replace(config, identity=identity)

    async def start_broker(self, name: str | None = None) -> Broker:
        if not self.is_linked:
            # Only the test copies the log and the tables.
            self.network.partition(_MASTER_HOST, _SLAVE_HOST)
        return await super().start_broker(name)

    @property
    def master(self) -> Broker:
        return self.broker(MASTER)

    @property
    def slave(self) -> Broker:
        return self.broker(SLAVE)

    async def copy(self) -> None:
        """Bring the slave up to date: log, topics, groups and offsets."""
        self.copy_log()
        master, slave = self.master.state, self.slave.state
        for name, topic in master.topics.table.items():
            if slave.topics.find(name) != topic:
                await slave.topics.update(topic)
        for key, offsets in master.offsets.snapshot.offset_table.items():
            topic_name, _, group = key.partition("@")
            for queue_id, offset in offsets.items():
                slave.offsets.commit(group, topic_name, queue_id, offset)

    def copy_log(self) -> None:
        master, slave = self.master.store, self.slave.store
        while (piece := master.raw(slave.written_end, 1 << 20)) is not None:
            slave.append_raw(slave.written_end, bytes(piece))
        slave.dispatch()


class LinkedReplicas(Replicas):
    is_linked = True


@asynccontextmanager
async def replicas(
    directory: Path, kind: type[Replicas] = Replicas, **settings: Any
) -> AsyncIterator[Replicas]:
    """Run a name server, the master and the slave; ``settings`` apply to both brokers."""
    config = brokers.config_at(directory, **settings)
    async with kind(
        directory, (MASTER, SLAVE), config=config, quality=LinkQuality(), skips_idle_time=False
    ) as made:
        yield made
