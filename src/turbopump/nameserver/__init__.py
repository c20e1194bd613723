"""The name server. `routes` is its core, without IO; `server` runs it."""

from turbopump.nameserver.config import NameServerConfig
from turbopump.nameserver.server import NameServer

__all__ = ["NameServer", "NameServerConfig"]
