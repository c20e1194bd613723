"""Settings of a name server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from turbopump.net.limits import RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN
from turbopump.settings import PORT_MAX, CheckedSettings, data_directory, setting

PORT = 9876
LOCKED_KEYS = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})
"""Not changeable by requests: a client could choose the files that the name server writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameServerConfig(CheckedSettings):
    """Settings of a name server; in files and requests by their keys in camelCase."""

    host: str = setting("bindAddress", "127.0.0.1")
    """Where to listen: name or IP address; 0.0.0.0 listens on all of the machine's."""

    port: int = setting("listenPort", PORT, 0, PORT_MAX)
    """0 takes any that is free."""

    order_message_enable: bool = False
    """Whether routes carry the configuration of ordered topics."""

    kv_config_path: Path = field(default_factory=lambda: data_directory() / "namesrv/kvConfig.json")
    """The file of key-values; the Java name server reads and writes the same."""

    config_store_path: Path | None = None
    """The file of ``key=value`` lines that changes by requests are written to; None keeps them in
    memory only."""

    connections_max: int = setting("connectionsMax", 10_000, 1)
    """Open connections; further ones are closed immediately."""

    receive_bytes_max: int = setting("receiveBytesMax", RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN)
    """Bytes received on all connections and not served, such as unfinished frames; above it, the
    connection is closed whose unfinished frame began first."""

    brokers_max: int = setting("brokersMax", 10_000, 1)
    """Brokers; registrations of more are refused."""

    topics_max: int = setting("topicsMax", 500_000, 1)
    """Topics, each counted once for every broker name that has it; a registration that would
    bring more is refused."""
