"""TLS identities: files named by options, checked at start, as credentials of servers and channels.

gRPC and Python's ssl module accept TLS 1.2 and later only. Certificates are read once, at start: to renew them, make a
rolling update.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from outrider.cluster.common.options import Options, option

if TYPE_CHECKING:
    import grpc

    from outrider.verifier_service.links.grpc_channel import LinkCredentials

MIN_SECRET_CHARS = 32


LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")  # as calls name this machine


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach a host: localhost, or an address of the loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """A certificate and its key in PEM files, and the CA of the peers' certificates (mutual TLS).

    Without `ca_certs`, clients need no certificate. `option` is the prefix of the options with these files.
    """

    option: str
    certfile: str
    keyfile: str
    ca_certs: str | None = None

    def check(self) -> None:
        """Raise `ValueError` naming the option of an unreadable file, or of one that does not match the others."""
        for name, path in self._files():
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"{name}: cannot read {path}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # an empty password: an encrypted key is refused, without a prompt on the terminal
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except ssl.SSLError as error:
            problem = f"{self.certfile} and {self.keyfile} are not a certificate and its unencrypted key ({error})"
            raise ValueError(f"{self.option}_certfile, {self.option}_keyfile: {problem}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise ValueError(f"{self.option}_ca_certs: {self.ca_certs} holds no certificate ({error})") from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server; raises `ValueError` as `check`."""
        import grpc  # not before: the command line knows these options, too

        self.check()
        pair = (Path(self.keyfile).read_bytes(), Path(self.certfile).read_bytes())
        return grpc.ssl_server_credentials([pair], self._ca(), require_client_auth=self.ca_certs is not None)

    def link_credentials(self, server_name: str | None, secret: str | None = None) -> LinkCredentials:
        """Return the credentials of a client that presents this certificate; raises `ValueError` as `check`."""
        import grpc

        from outrider.verifier_service.links.grpc_channel import LinkCredentials

        self.check()
        key, certificate = Path(self.keyfile).read_bytes(), Path(self.certfile).read_bytes()
        channel = grpc.ssl_channel_credentials(self._ca(), key, certificate)
        return LinkCredentials(channel=channel, server_name=server_name, secret=secret)

    def _ca(self) -> bytes | None:
        return None if self.ca_certs is None else Path(self.ca_certs).read_bytes()

    def _files(self) -> Iterator[tuple[str, str]]:
        for name in ("certfile", "keyfile", "ca_certs"):
            if (path := getattr(self, name)) is not None:
                yield f"{self.option}_{name}", path


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind a gRPC server, in plaintext without credentials; return the port. Raises `RuntimeError` as gRPC does."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def public_tls(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> TlsConfig | None:
    """Return the TLS of the public ports; None: plaintext. Raises `ValueError` naming a missing option."""
    return _complete("ssl", certfile, keyfile, ca_certs)


class LinkTls(Options):
    """The TLS files of the links between our own services: mutual TLS, or none; and the secret that stands for it."""

    link_ssl_certfile: str | None = option(
        None,
        "PEM: certificate of our own services towards each other, for servers and clients. Always mutual TLS.",
    )
    link_ssl_keyfile: str | None = option(None, "PEM: key of --link-ssl-certfile.")
    link_ssl_ca_certs: str | None = option(None, "PEM: who signs our own services' certificates.")
    link_ssl_server_name: str | None = option(
        None,
        "Name in our own services' certificates, where replicas share one on addresses not known before. "
        "Default: the address that a replica listens at.",
    )

    link_secret_file: str | None = option(
        None,
        f"File with a secret of at least {MIN_SECRET_CHARS} characters, which our own services show each other. Beyond "
        "this machine links need it or TLS; Default: one that the Ray cluster keeps.",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        files = (self.link_ssl_certfile, self.link_ssl_keyfile, self.link_ssl_ca_certs)
        if any(files) and self.link_ssl_ca_certs is None:
            raise ValueError("link_ssl_ca_certs is missing: between our own services TLS is mutual")
        if _complete("link_ssl", *files) is None and self.link_ssl_server_name is not None:
            raise ValueError("link_ssl_server_name needs link_ssl_certfile, link_ssl_keyfile and link_ssl_ca_certs")
        return self

    @property
    def tls(self) -> TlsConfig | None:
        return _complete("link_ssl", self.link_ssl_certfile, self.link_ssl_keyfile, self.link_ssl_ca_certs)

    def check(self) -> None:
        """Raise `ValueError` naming the option of an unusable file."""
        if self.tls is not None:
            self.tls.check()
        if self.link_secret_file is not None:
            read_secret(self.link_secret_file)

    @property
    def is_closed(self) -> bool:
        """Whether links ask who comes."""
        return self.tls is not None or self.link_secret_file is not None

    @property
    def secret(self) -> str | None:
        """What callers show; None: nothing. Raises `ValueError` naming the option of an unusable file."""
        return None if self.link_secret_file is None else read_secret(self.link_secret_file)

    @property
    def server_interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """What a server of links asks callers for, beside a certificate."""
        from outrider.verifier_service.links.grpc_channel import SecretInterceptor

        return () if self.secret is None else (SecretInterceptor(self.secret),)

    @property
    def server_credentials(self) -> grpc.ServerCredentials | None:
        return None if self.tls is None else self.tls.server_credentials()

    @property
    def credentials(self) -> LinkCredentials | None:
        """The credentials of a client; None: links are in plaintext, and ask for nothing."""
        from outrider.verifier_service.links.grpc_channel import LinkCredentials

        secret = self.secret
        if self.tls is not None:
            return self.tls.link_credentials(self.link_ssl_server_name, secret)
        return None if secret is None else LinkCredentials(secret=secret)


def read_secret(path: str) -> str:
    """Return the secret in a file; raises `ValueError` naming the option of what is none, without its text."""
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"link_secret_file: cannot read {path}: {error}") from error
    if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        raise ValueError(f"link_secret_file: {path} must hold {MIN_SECRET_CHARS} printable ASCII characters or more")
    return secret


def _complete(option: str, certfile: str | None, keyfile: str | None, ca_certs: str | None) -> TlsConfig | None:
    if certfile is None and keyfile is None and ca_certs is None:
        return None
    if certfile is None:
        raise ValueError(f"{option}_certfile is missing")
    if keyfile is None:
        raise ValueError(f"{option}_keyfile is missing")
    return TlsConfig(option=option, certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)
