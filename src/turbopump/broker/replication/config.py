"""Replication settings, each with its key in files."""

from __future__ import annotations

from dataclasses import dataclass

from turbopump.errors import InvalidArgument
from turbopump.net.network import address_text
from turbopump.settings import PORT_MAX, check_settings, require, setting
from turbopump.wire.hosts import split_address

TRANSFER_BYTES_MAX = 4 * 1024 * 1024 - 4096
"""Apache RocketMQ's slaves have a receive buffer of 4 MiB, which must hold a whole frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """How a master sends its log to slaves, and how a slave follows its master."""

    port: int = setting("haListenPort", 0, 0, PORT_MAX)
    """Where a master listens for slaves; 0 takes ``listenPort`` + 1, or any port that is free if
    that one is taken."""
    advertised_host: str = setting("brokerIP2", "")
    """The host that slaves connect to; empty takes that of clients."""
    master_address: str = setting("haMasterAddress", "")
    """A slave's master as host:port of its HA port; empty takes what name servers report."""
    heartbeat_ms: int = setting("haSendHeartbeatInterval", 5000, 1)
    """Time without traffic after which either side sends a heartbeat."""
    idle_max_ms: int = setting("haHousekeepingInterval", 20_000, 1)
    """Time without traffic after which either side closes the connection."""
    transfer_bytes: int = setting(
        "haTransferBatchSize", 32 * 1024, 1024, TRANSFER_BYTES_MAX, live=True
    )
    """Most bytes of the log in one frame."""
    transfer_bytes_per_s: int = setting("maxHaTransferByteInSecond", 0, 0, live=True)
    """Most bytes of the log that a master sends each second, to all of its slaves together; 0 for
    no limit."""
    fall_behind_max_bytes: int = setting("haSlaveFallbehindMax", 256 * 1024 * 1024, 1, live=True)
    """A slave that lacks this many bytes is not in sync: a SYNC_MASTER does not wait for it."""
    timeout_ms: int = setting("slaveTimeout", 3000, 1)
    """How long a send waits for a slave with SYNC_MASTER."""

    @property
    def master_broker_address(self) -> str:
        """Where tables are copied from until a name server reports it: the port before the log's.

        Empty if no master is configured.
        """
        if not self.master_address:
            return ""
        host, port = split_address(self.master_address)
        return address_text((host, port - 1))

    def __post_init__(self) -> None:
        check_settings(self)
        if self.master_address:
            try:
                split_address(self.master_address)
            except InvalidArgument as error:
                raise InvalidArgument(f"haMasterAddress: {error}") from error
        allowed = f"at least {self.heartbeat_ms}, the haSendHeartbeatInterval"
        ok = self.idle_max_ms >= self.heartbeat_ms
        require(ok, "haHousekeepingInterval", self.idle_max_ms, allowed)
