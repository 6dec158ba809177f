"""TLS of HTTP: contexts for both ends, made of the material of now.

Only TLS 1.3, no tickets: a resumed connection would not be asked for its certificate again.
"""

import os
import ssl

from specserve_workers.identity.material import Material, MaterialSource, NoIdentityError, throwaway_material
from specserve_workers.identity.names import ServiceId


def server_context(source: MaterialSource) -> ssl.SSLContext:
    """A context that serves each new connection with the material of its time, and nobody before there is any."""
    throwaway = throwaway_material()
    shown = (throwaway.version, _server_context(throwaway))

    def choose(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        nonlocal shown
        try:
            material = source.current()
        except NoIdentityError:
            pass
        else:
            if material.version != shown[0]:
                shown = (material.version, _server_context(material))
        connection.context = shown[1]

    listening = _server_context(throwaway)
    # Called for every connection, also for one that names no server.
    listening.sni_callback = choose
    return listening


class PeerContext:
    """Contexts of a client of one pool of this service."""

    def __init__(self, source: MaterialSource, service: ServiceId, *, pool: str) -> None:
        self._source = source
        self.server_name = service.host(pool)
        self._made: tuple[int, ssl.SSLContext] | None = None

    def current(self) -> ssl.SSLContext:
        """The context of now; connections of another one are not to be used again. Raises `NoIdentityError`."""
        material = self._source.current()
        if self._made is None or self._made[0] != material.version:
            self._made = material.version, _fill(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), material)
        return self._made[1]


def peer_uri(certificate: object) -> str:
    """The URI in what `SSLObject.getpeercert()` returns; empty if there is none, or more than one."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    uris = [value for kind, value in names if kind == "URI"]
    return uris[0] if len(uris) == 1 else ""


def _server_context(material: Material) -> ssl.SSLContext:
    context = _fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


def _fill(context: ssl.SSLContext, material: Material) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=material.trust_pem.decode())
    # The library reads keys from files only; this one is in memory and has no name.
    descriptor = os.memfd_create("specserve-identity", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(material.key_pem + material.certificate_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context
