"""Addresses of pods: a block of 127.77.0.0/16 for each control plane, one address of it for each pod.

All of 127.0.0.0/8 is the loopback interface on Linux, so an address needs no set-up, and with one of its own each pod
can have the ports it would have in a cluster.
"""

from collections.abc import Callable

from specserve_operator.cluster.protocol import ClusterError

_BLOCKS = 256
_FIRST_HOST, _LAST_HOST = 2, 254  # .1 is the pod API, which also marks the block as taken


class NoFreeAddressError(ClusterError):
    """All addresses of the block belong to pods."""

    def __init__(self) -> None:
        super().__init__(f"no free pod address: at most {_LAST_HOST - _FIRST_HOST + 1} pods run here at a time")


def api_addresses() -> list[str]:
    """The first address of every block, in the order in which control planes try them."""
    return [f"127.77.{block}.1" for block in range(_BLOCKS)]


class PodAddresses:
    """Gives the addresses of a block to pods. One that was just given back is used again last."""

    def __init__(self, api_address: str) -> None:
        self._prefix = api_address.rpartition(".")[0]
        self._free = [f"{self._prefix}.{host}" for host in range(_FIRST_HOST, _LAST_HOST + 1)]
        self._by_pod: dict[str, str] = {}

    def acquire(self, pod_uid: str, *, is_usable: Callable[[str], bool] = lambda _: True) -> str:
        """The pod's address; the same as long as the pod keeps it. Raises `NoFreeAddressError`.

        The next one that `is_usable`, or if none is, the next one: then the pod says what is in its way.
        """
        if pod_uid not in self._by_pod:
            if not self._free:
                raise NoFreeAddressError
            chosen = next(filter(is_usable, self._free), self._free[0])
            self._free.remove(chosen)
            self._by_pod[pod_uid] = chosen
        return self._by_pod[pod_uid]

    def release(self, pod_uid: str) -> None:
        address = self._by_pod.pop(pod_uid, None)
        if address is not None:
            self._free.append(address)
