"""gRPC channels to producers, shared by the pulls to one address and dropped after a failure."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from specserve_workers.identity.channels import ChannelTls, PeerTls
from specserve_workers.identity.material import NoIdentityError
from specserve_workers.kv.errors import ConnectError, KvNoIdentityError

_MAX_MESSAGE_BYTES: Final = 64 << 20  # one block of one layer may be larger than a chunk
_IDLE_CLOSE_MS: Final = 60_000


@dataclass(slots=True)
class _Shared:
    channel: grpc.Channel
    version: int | None
    users: int = 0
    is_dropped: bool = False


class ChannelPool:
    """One channel for each address. Thread-safe. An idle channel closes its connection by itself.

    Args:
        tls: of the producers; None connects in plaintext.
    """

    def __init__(self, *, tls: PeerTls | None = None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._by_address: dict[str, _Shared] = {}
        self._is_closed = False

    @contextmanager
    def channel(self, address: str) -> Iterator[grpc.Channel]:
        """Lend a channel; it connects with its first call.

        An error inside drops the channel, so that the next use connects anew and without gRPC's back-off: a peer
        that was restarted is found at once. A channel of an older certificate is lent no more. Raises `ConnectError`
        after `close`, and `KvNoIdentityError`.
        """
        shared = self._borrow(address)
        try:
            yield shared.channel
        except BaseException:
            self._drop(address, shared)
            raise
        finally:
            self._give_back(shared)

    def close(self) -> None:
        """Lend no more, and close each channel once nobody uses it."""
        with self._lock:
            self._is_closed = True
            idle = [shared for shared in self._by_address.values() if shared.users == 0]
            for shared in self._by_address.values():
                shared.is_dropped = True
            self._by_address = {}
        for shared in idle:
            shared.channel.close()

    def _borrow(self, address: str) -> _Shared:
        tls = self._current_tls(address)
        version = None if tls is None else tls.version
        with self._lock:
            if self._is_closed:
                raise ConnectError(f"{address}: this consumer is shutting down")
            shared = self._by_address.get(address)
            outdated = None
            if shared is None or shared.version != version:
                outdated = shared
                shared = self._by_address[address] = _Shared(self._open(address, tls), version)
            shared.users += 1
            must_close = outdated is not None and outdated.users == 0
            if outdated is not None:
                outdated.is_dropped = True
        if outdated is not None and must_close:
            outdated.channel.close()
        return shared

    def _current_tls(self, address: str) -> ChannelTls | None:
        try:
            return self._tls.current() if self._tls is not None else None
        except NoIdentityError as error:
            raise KvNoIdentityError(f"{address}: {error}") from error

    def _drop(self, address: str, shared: _Shared) -> None:
        with self._lock:
            shared.is_dropped = True
            if self._by_address.get(address) is shared:
                del self._by_address[address]

    def _give_back(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            # Others may still pull over it: closing would cut them.
            must_close = shared.is_dropped and shared.users == 0
        if must_close:
            # It waits for the end of all calls, and gRPC may leave one that failed without an end.
            threading.Thread(target=shared.channel.close, name="specserve-kv-close", daemon=True).start()

    def _open(self, address: str, tls: ChannelTls | None) -> grpc.Channel:
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.client_idle_timeout_ms", _IDLE_CLOSE_MS),
            # Channels that share a connection share its back-off too, which `_drop` is to escape.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            # gRPC repeats a call whose connection was shut down under it; where it then finds nobody, it may never
            # complete it.
            ("grpc.enable_retries", 0),
        ]
        if tls is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, tls.credentials, options=[*options, *tls.options])
