"""Settings of TLS, and the contexts made from them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from turbopump.errors import InvalidArgument

HANDSHAKE_FIRST_BYTE = 0x16
"""Every TLS connection opens with it; a frame that does would be longer than any is allowed."""


class TlsMode(Enum):
    """Whom a server lets in."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's side: its certificate, and whose certificates it asks for."""

    certificate_path: Path
    key_path: Path | None = None
    """The private key; None when it stands in the certificate's file."""

    key_password: str | None = None
    mode: TlsMode = TlsMode.PERMISSIVE
    """Permissive takes connections with TLS and without: the first byte decides."""

    client_trust_path: Path | None = None
    """Whom to trust; when given, clients must show a certificate."""

    def context(self) -> ssl.SSLContext:
        """Read the files; raises InvalidArgument when they cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_certificate(context, self.certificate_path, self.key_path, self.key_password)
        if self.client_trust_path is not None:
            _load_trust(context, self.client_trust_path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The client's side: whom it trusts, and the certificate that it shows."""

    trust_path: Path | None = None
    """Certificates to trust, and no others; None trusts those of the system."""

    verify: bool = True
    """False trusts anybody, as the Java client does in its test mode."""

    server_name: str | None = None
    """The name that the server's certificate must carry; None takes the host of the address."""

    certificate_path: Path | None = None
    key_path: Path | None = None
    key_password: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; raises InvalidArgument when they cannot be used."""
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
        # A text even when there is none: otherwise OpenSSL would ask at the terminal.
        context.load_cert_chain(certificate, key, password or "")
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"TLS certificate {certificate} with key {key}: {error}") from error


def _load_trust(context: ssl.SSLContext, trusted: Path) -> None:
    try:
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"trusted TLS certificates {trusted}: {error}") from error
