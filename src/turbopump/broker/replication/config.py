"""Replication settings. In brackets: the key in files."""

from __future__ import annotations

from dataclasses import dataclass

from turbopump.broker.setting_checks import PORT_MAX, require_int, require_text
from turbopump.errors import InvalidArgument
from turbopump.net.network import address_text
from turbopump.wire.hosts import split_address

TRANSFER_BYTES_MAX = 4 * 1024 * 1024 - 4096
"""Apache RocketMQ's slaves have a receive buffer of 4 MiB, which must hold a whole frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """How a master sends its log to slaves, and how a slave follows its master."""

    port: int = 0
    """Where a master listens for slaves; 0 takes ``listenPort`` + 1, or any port that is free if
    that one is taken [haListenPort]."""
    advertised_host: str = ""
    """The host that slaves connect to; empty takes that of clients [brokerIP2]."""
    master_address: str = ""
    """A slave's master as host:port of its HA port; empty takes what name servers report
    [haMasterAddress]."""
    heartbeat_ms: int = 5000
    """Time without traffic after which either side sends a heartbeat [haSendHeartbeatInterval]."""
    idle_max_ms: int = 20_000
    """Time without traffic after which either side closes the connection
    [haHousekeepingInterval]."""
    transfer_bytes: int = 32 * 1024
    """Most bytes of the log in one frame [haTransferBatchSize]."""
    transfer_bytes_per_s: int = 0
    """Most bytes of the log that a master sends each second, to all of its slaves together; 0 for
    no limit [maxHaTransferByteInSecond]."""
    fall_behind_max_bytes: int = 256 * 1024 * 1024
    """A slave that lacks this many bytes is not in sync: a SYNC_MASTER does not wait for it
    [haSlaveFallbehindMax]."""
    timeout_ms: int = 3000
    """How long a send waits for a slave with SYNC_MASTER [slaveTimeout]."""

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
        require_int("haListenPort", self.port, 0, PORT_MAX)
        require_text("brokerIP2", self.advertised_host, empty=True)
        require_text("haMasterAddress", self.master_address, empty=True)
        if self.master_address:
            try:
                split_address(self.master_address)
            except InvalidArgument as error:
                raise InvalidArgument(f"haMasterAddress: {error}") from error
        require_int("haSendHeartbeatInterval", self.heartbeat_ms, 1)
        require_int("haHousekeepingInterval", self.idle_max_ms, self.heartbeat_ms)
        require_int("haTransferBatchSize", self.transfer_bytes, 1024, TRANSFER_BYTES_MAX)
        require_int("maxHaTransferByteInSecond", self.transfer_bytes_per_s, 0)
        require_int("haSlaveFallbehindMax", self.fall_behind_max_bytes, 1)
        require_int("slaveTimeout", self.timeout_ms, 1)
