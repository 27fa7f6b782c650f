"""Certificates for tests: a CA, what it signed, what is expired, and what a stranger signed."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme

from outrider.cluster.common.security import LinkTls, TlsConfig

EXPIRED = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, as PEM files."""

    certfile: str
    keyfile: str


class Certificates:
    """PEM files in a folder; everything that has a server name is for 127.0.0.1 unless it says otherwise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca, stranger = trustme.CA(), trustme.CA()
        self.ca_certs = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_certs)
        self.other_ca_certs = str(folder / "other_ca.pem")
        stranger.cert_pem.write_to_path(self.other_ca_certs)
        self.server = self._issue(self._ca, "server", "127.0.0.1", "localhost")
        self.client = self._issue(self._ca, "client", "client.test")
        self.named = self._issue(self._ca, "named", "replica.outrider")  # names no address
        self.expired = self._issue(self._ca, "expired", "127.0.0.1", not_after=EXPIRED)
        self.strange = self._issue(stranger, "strange", "127.0.0.1")

    def _issue(self, ca: trustme.CA, name: str, *hosts: str, not_after: datetime.datetime | None = None) -> Identity:
        issued = ca.issue_cert(*hosts, not_after=not_after)
        identity = Identity(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(identity.certfile)
        issued.private_key_pem.write_to_path(identity.keyfile)
        return identity

    def tls(self, *, mutual: bool, identity: Identity | None = None) -> TlsConfig:
        """Return a server's TLS for the public ports."""
        identity = identity or self.server
        ca_certs = self.ca_certs if mutual else None
        return TlsConfig(option="ssl", certfile=identity.certfile, keyfile=identity.keyfile, ca_certs=ca_certs)

    def link(self, identity: Identity | None = None, *, ca_certs: str | None = None) -> TlsConfig:
        """Return one service's TLS for the links."""
        identity = identity or self.server
        tls = LinkTls(
            link_ssl_certfile=identity.certfile,
            link_ssl_keyfile=identity.keyfile,
            link_ssl_ca_certs=ca_certs or self.ca_certs,
        ).tls
        assert tls is not None
        return tls

    def client_context(self, identity: Identity | None = None, *, ca_certs: str | None = None) -> ssl.SSLContext:
        """Return what an HTTPS client verifies servers with, presenting `identity`."""
        context = ssl.create_default_context(cafile=ca_certs or self.ca_certs)
        if identity is not None:
            context.load_cert_chain(identity.certfile, identity.keyfile)
        return context

    def channel_credentials(
        self, identity: Identity | None = None, *, ca_certs: str | None = None
    ) -> grpc.ChannelCredentials:
        """Return what a gRPC client verifies servers with, presenting `identity`."""
        ca = Path(ca_certs or self.ca_certs).read_bytes()
        if identity is None:
            return grpc.ssl_channel_credentials(ca)
        key, certificate = Path(identity.keyfile).read_bytes(), Path(identity.certfile).read_bytes()
        return grpc.ssl_channel_credentials(ca, key, certificate)
