"""gRPC channels to producers, shared by the pulls to one address and dropped after a failure."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from specserve_workers.kv.errors import ConnectError

_MAX_MESSAGE_BYTES: Final = 64 << 20  # one block of one layer may be larger than a chunk
_IDLE_CLOSE_MS: Final = 60_000


@dataclass(slots=True)
class _Shared:
    channel: grpc.Channel
    users: int = 0
    is_dropped: bool = False


class ChannelPool:
    """One channel for each address. Thread-safe. An idle channel closes its connection by itself.

    Args:
        credentials: TLS of the client; None connects in plaintext.
    """

    def __init__(self, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._by_address: dict[str, _Shared] = {}
        self._is_closed = False

    @contextmanager
    def channel(self, address: str) -> Iterator[grpc.Channel]:
        """Lend a channel; it connects with its first call.

        An error inside drops the channel, so that the next use connects anew and without gRPC's back-off: a peer
        that was restarted is found at once. Raises `ConnectError` after `close`.
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
        with self._lock:
            if self._is_closed:
                raise ConnectError(f"{address}: this consumer is shutting down")
            shared = self._by_address.get(address)
            if shared is None:
                shared = self._by_address[address] = _Shared(self._open(address))
            shared.users += 1
            return shared

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
            shared.channel.close()

    def _open(self, address: str) -> grpc.Channel:
        options = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.client_idle_timeout_ms", _IDLE_CLOSE_MS),
            # Channels that share a connection share its back-off too, which `_drop` is to escape.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if self._credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._credentials, options=options)
