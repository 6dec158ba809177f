"""Ports of this machine: whether one can be had, and who has it."""

import errno
import os
import socket
from pathlib import Path

_LISTEN = "0A"
_ANY_ADDRESS = ("00000000", "0" * 32)


def find_conflict(host: str, port: int) -> str | None:
    """Why nobody can listen on `host:port` now, in words; None if it is free."""
    try:
        reserve(host, port).close()
    except OSError as error:
        return explain(error, host, port)
    return None


def can_listen(host: str, port: int) -> bool:
    """True if `host:port` is free now."""
    try:
        reserve(host, port).close()
    except OSError:
        return False
    return True


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds `host:port` and does not listen yet: connections are refused. Raises OSError.

    Nobody else can bind the port from now on, not even with SO_REUSEADDR, which lets two sockets share a port as long
    as both have it and neither listens. Hence the moment of listening, when the kernel looks at the whole port, and
    hence no SO_REUSEADDR afterwards. It is needed before, for the sake of connections in TIME_WAIT.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.setblocking(False)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        start_listening(reserved, backlog=1)
        stop_listening(reserved)
    except OSError:
        reserved.close()
        raise
    return reserved


def start_listening(reserved: socket.socket, *, backlog: int) -> None:
    """From now on connections are queued. Raises OSError if another socket has the port."""
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.listen(backlog)


def stop_listening(reserved: socket.socket) -> None:
    """From now on connections are refused, those in the queue are reset, and the port stays held."""
    reserved.shutdown(socket.SHUT_RDWR)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def explain(error: OSError, host: str, port: int) -> str:
    """Words for a bind that failed."""
    if error.errno == errno.EADDRINUSE:
        owner = _find_listener(host, port)
        return f"port {port} of {host} is in use" + (f" by {owner}" if owner else "")
    if error.errno == errno.EACCES:
        return f"port {port} of {host} needs privileges: choose one above 1023"
    return f"port {port} of {host} can't be used: {error.strerror}"


def _find_listener(host: str, port: int) -> str | None:
    """Name and pid of the process that listens on the port, if it may be seen."""
    inode = _listening_inode(host, port)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = (os.readlink(fd) for fd in (process / "fd").iterdir())
            if wanted in links:
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # ended, or another user's
    return None


def _listening_inode(host: str, port: int) -> str | None:
    own_address = socket.inet_aton(host)[::-1].hex().upper()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            address, _, hex_port = fields[1].rpartition(":")
            if fields[3] == _LISTEN and int(hex_port, 16) == port and address in (own_address, *_ANY_ADDRESS):
                return fields[9]
    return None
