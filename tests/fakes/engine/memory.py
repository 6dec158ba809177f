"""Many fake pods run on one machine: what keeps each of them small and quick to start."""

import ctypes
import gc
import importlib
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

# `mallopt` of glibc: how many areas of memory threads may have to themselves.
_M_ARENA_MAX: Final = -8


def save() -> None:
    """To be called first."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    # What follows makes two TLS contexts at import, with the certificates of all public authorities.
    os.environ.setdefault("SSL_CERT_FILE", os.devnull)
    os.environ.setdefault("SSL_CERT_DIR", os.devnull)
    # The HTTP client of decode pods with peers takes a sixth of the memory and half of the start.
    sys.modules["aiohttp"] = LateModule("aiohttp")


def give_back() -> None:
    """Returns to the system what starting has left behind."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class LateModule(ModuleType):
    """Imports the module of its name when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
