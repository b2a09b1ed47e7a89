"""TLS of the HTTP edge: certificate and key from files, read again when they change.

Comes in: settings. Goes out: an option of uvicorn's. What ends a connection is http_protocol.py's.
A new certificate serves handshakes from then on, connections that are open keep theirs; a pair that
cannot be read (half written, of two makes) leaves the one before in place. The files are looked at
when a client comes, at most every LOOK_EVERY_S, so no task and no signal is needed.
"""

import logging
import os
import ssl
import time
from collections.abc import Callable
from typing import Any

from gateway.settings.http_settings import HttpSettings

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


class Certificate:
    """Certificate and key, as they are now. Raises OSError or ssl.SSLError where the files cannot
    be used at first."""

    def __init__(
        self, cert_file: str, key_file: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = [name for name in (cert_file, key_file) if name]
        self._clock = clock
        self._seen = self._stamps()
        self._looked_s = clock()
        self._current = self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, handshake: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        """Called in each handshake, whether or not the client names a server."""
        del name, outer
        self._refresh()
        if self._current is not self.context:
            handshake.context = self._current

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return
            self._current = self._load()
        except (OSError, ssl.SSLError) as error:
            logger.error("cannot reload the TLS certificate, keeping the old one: %s", error)
            return
        self._seen = stamps
        logger.info("reloaded the TLS certificate file=%s", self._files[0])

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        cert_file, key_file = (*self._files, None)[:2]
        assert cert_file is not None
        context.load_cert_chain(cert_file, key_file, _no_password)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = [os.stat(name) for name in self._files]
        return [(file.st_mtime_ns, file.st_size, file.st_ino) for file in found]


def _no_password() -> str:
    """Or OpenSSL asks at the terminal, in the midst of a handshake, and everybody waits. Raises
    OSError."""
    raise OSError("the private key is encrypted: use a key without a password")


def tls_options(settings: HttpSettings) -> dict[str, Any]:
    """Of uvicorn.Config; none where TLS is not asked for. Raises as `Certificate`."""
    if not settings.tls_cert_file:
        return {}
    certificate = Certificate(settings.tls_cert_file, settings.tls_key_file)
    return {"ssl_context_factory": lambda config, default: certificate.context}
