"""What operators see of replication: on a master its slaves, on a slave the link to its master."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from turbopump.message import PhysicalOffset


class LinkState(Enum):
    """The state of a slave's link to its master."""

    NO_MASTER = "no master"
    """No address is configured, and no name server has reported one."""
    DISCONNECTED = "disconnected"
    """The last attempt failed, or the connection was lost; the next attempt follows."""
    COMPARING = "comparing"
    """Connected; the end of the slave's log is compared with the master's."""
    CATCHING_UP = "catching up"
    """Connected; the master has more than the slave has stored."""
    IN_SYNC = "in sync"
    """Connected; the slave has everything that the master had when it was last asked, at most 10 s
    ago. Apache's masters cannot be asked: there, everything that the master has sent."""


class SlaveStatus(Struct, frozen=True, kw_only=True):
    """A slave as its master sees it."""

    address: str
    acknowledged: PhysicalOffset
    """Position up to which it has stored the log."""
    lag_bytes: int
    is_in_sync: bool
    """Whether a SYNC_MASTER waits for it: it lacks less than ``haSlaveFallbehindMax``."""


class MasterLink(Struct, frozen=True, kw_only=True):
    """The link of a slave to its master."""

    address: str
    """Of the master's HA port; empty if it is not known."""
    state: LinkState
    lag_bytes: int
    """Bytes that the master is known to have and this slave has not stored."""
    last_error: str
    """Why the last connection failed or ended; empty if none has since it is in sync."""
    cut_bytes: int
    """Bytes that differed from the master's log and were cut off since the start."""


class ReplicationStatus(Struct, frozen=True, kw_only=True):
    """Replication of one broker."""

    ha_address: str
    """Where slaves connect to."""
    end: PhysicalOffset
    """Where this broker's log ends."""
    slaves: tuple[SlaveStatus, ...] = ()
    master: MasterLink | None = None
    """None on a master."""
