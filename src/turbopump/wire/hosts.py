"""Network addresses in messages and ids: 4 or 16 bytes of IP, then the port as an i32."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from msgspec import Struct

from turbopump.errors import InvalidArgument

V4_BYTES = 4
V6_BYTES = 16
PORT_BYTES = 4

ANY_HOST = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
"""Names for all addresses of a machine, to listen on."""

_PORT_MAX = 0xFFFF
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class Host(Struct, frozen=True):
    """An IP address, 4 or 16 bytes, and a port."""

    ip: bytes
    port: int

    def __post_init__(self) -> None:
        if len(self.ip) not in (V4_BYTES, V6_BYTES):
            raise InvalidArgument(f"an IP address must be 4 or 16 bytes, got {len(self.ip)}")

    @property
    def is_v6(self) -> bool:
        return len(self.ip) == V6_BYTES

    @property
    def packed(self) -> bytes:
        """The bytes of address and port, as in records."""
        try:
            return self.ip + self.port.to_bytes(PORT_BYTES, "big", signed=True)
        except OverflowError as error:
            raise InvalidArgument(f"port must fit into 32 bits, got {self.port}") from error

    @property
    def address(self) -> str:
        return str(ipaddress.ip_address(self.ip))

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if self.is_v6 else f"{self.address}:{self.port}"


@lru_cache(maxsize=4096)
def host(address: str, port: int) -> Host:
    """Create a host from an IP address as text; names are not resolved."""
    try:
        return Host(ipaddress.ip_address(address).packed, port)
    except ValueError as error:
        raise InvalidArgument(f"address {address!r} is not an IP address") from error


def split_address(text: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host is in brackets."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > _PORT_MAX:
        raise InvalidArgument(f"address {text[:200]!r}: expected host:port, as in 127.0.0.1:9876")
    return match["v6"] or match["name"], int(match["port"])
