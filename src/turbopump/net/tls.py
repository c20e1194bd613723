"""TLS settings, and the contexts made from them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from turbopump.errors import InvalidArgument

HANDSHAKE_FIRST_BYTE = 0x16
"""The first byte of every TLS connection; a frame that begins so would exceed the limit."""


class TlsMode(Enum):
    """Which connections a server accepts."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's certificate, and which client certificates it requires."""

    certificate_path: Path
    key_path: Path | None = None
    """The private key; None if it is in the certificate's file."""

    key_password: str | None = None
    mode: TlsMode = TlsMode.PERMISSIVE
    """Permissive accepts connections with and without TLS: the first byte decides."""

    client_trust_path: Path | None = None
    """Trusted certificates; if given, clients must present one."""

    def context(self) -> ssl.SSLContext:
        """Read the files; raises InvalidArgument if they cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_certificate(context, self.certificate_path, self.key_path, self.key_password)
        if self.client_trust_path is not None:
            _load_trust(context, self.client_trust_path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Which certificates a client trusts, and which one it presents.

    ::

        ClientConfig("10.0.0.1:9876", tls=ClientTls(Path("/etc/turbopump/ca.pem")))
    """

    trust_path: Path | None = None
    """The only trusted certificates; None trusts those of the system."""

    verify: bool = True
    """False accepts any certificate, as the Java client does in its test mode."""

    server_name: str | None = None
    """The name in the server's certificate; None takes the host of the address."""

    certificate_path: Path | None = None
    key_path: Path | None = None
    key_password: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; raises InvalidArgument if they cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.trust_path is None:
            context.load_default_certs()
        else:
            _load_trust(context, self.trust_path)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_path is not None:
            _load_certificate(context, self.certificate_path, self.key_path, self.key_password)
        return context


def _load_certificate(
    context: ssl.SSLContext, certificate: Path, key: Path | None, password: str | None
) -> None:
    try:
        # Never None: OpenSSL would prompt on the terminal.
        context.load_cert_chain(certificate, key, password or "")
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"TLS certificate {certificate} with key {key}: {error}") from error


def _load_trust(context: ssl.SSLContext, trusted: Path) -> None:
    try:
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"trusted TLS certificates {trusted}: {error}") from error
