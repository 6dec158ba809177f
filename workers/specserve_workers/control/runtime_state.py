"""Run-time settings of a pod: what the state file and `ControlService` may change without a restart."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specserve_workers.speculation.settings import SettingsError, SpeculationSettings, parse_settings

logger = logging.getLogger(__name__)

VERSION: Final = 1
MAX_GENERATION: Final = 2**53
POLL_SECONDS: Final = 1.0


class RuntimeStateError(ValueError):
    """A run-time state that cannot be applied. Names the field."""


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """Settings with the generation of the service they come from."""

    generation: int
    speculation: SpeculationSettings


def parse_runtime_state(text: str) -> RuntimeState:
    """Reads the state file's content.

    Unknown fields are ignored: a newer operator may write them while older pods still run.

    Raises:
        RuntimeStateError: not JSON, a field missing or out of its range, another format version.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise RuntimeStateError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RuntimeStateError("not a JSON object")
    if document.get("version") != VERSION:
        raise RuntimeStateError(f"version must be {VERSION}, not {document.get('version')!r}")
    generation = document.get("generation")
    if not isinstance(generation, int) or isinstance(generation, bool) or not 0 <= generation <= MAX_GENERATION:
        raise RuntimeStateError(f"generation must be a whole number between 0 and 2**53, not {str(generation)[:40]!r}")
    try:
        return RuntimeState(generation, parse_settings(document.get("speculation")))
    except SettingsError as error:
        raise RuntimeStateError(str(error)) from error


class SpeculationControl:
    """The settings in force, and the only place that changes them.

    `apply` brings settings to the engine and returns once they are in force there. `warns_without_drafter`: a pod that
    could have a drafter says in its log, once, that a policy is off for want of one.
    """

    def __init__(
        self,
        initial: SpeculationSettings,
        *,
        started_max_tokens: int,
        apply: Callable[[RuntimeState], Awaitable[None]],
        warns_without_drafter: bool = False,
    ) -> None:
        self.started_max_tokens = started_max_tokens
        self.state = RuntimeState(0, initial.limited(started_max_tokens))
        self._apply = apply
        self._warns_without_drafter = warns_without_drafter
        self._lock = asyncio.Lock()

    async def install(self) -> None:
        """Brings the initial settings to the engine, so that what is reported is what runs."""
        async with self._lock:
            await self._apply(self.state)

    async def offer(self, state: RuntimeState) -> bool:
        """Applies settings unless newer ones are in force; True if these are in force afterwards."""
        async with self._lock:
            if state.generation < self.state.generation:
                return False
            wanted = RuntimeState(state.generation, state.speculation.limited(self.started_max_tokens))
            if 0 < self.started_max_tokens < state.speculation.max_tokens:
                logger.warning("drafts stay within the %d tokens of the engine's start", self.started_max_tokens)
            if self._warns_without_drafter and wanted.speculation.policy != state.speculation.policy:
                logger.warning(
                    "speculation stays off: policy %s is set, but this pod was started with no drafter",
                    state.speculation.policy,
                )
                self._warns_without_drafter = False
            if wanted != self.state:
                await self._apply(wanted)
                logger.info("generation %d in force: %s", wanted.generation, wanted.speculation.to_state())
                self.state = wanted
            return True


class StateFile:
    """Watches the mounted state file by its content: mounts are replaced by link, so times and inodes tell nothing."""

    def __init__(self, path: Path, *, offer: Callable[[RuntimeState], Awaitable[bool]]) -> None:
        self._path = path
        self._offer = offer
        self._seen: str | None = None

    async def poll(self) -> None:
        """Applies the file if its content changed. Never raises: the last good state stays."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s: %s; the last good state stays", self._path, error)
            return
        if text == self._seen:
            return
        try:
            if not await self._offer(parse_runtime_state(text)):
                logger.warning("%s: older than the settings in force; ignored", self._path)
        except RuntimeStateError as error:
            logger.warning("%s: %s; the last good state stays", self._path, error)
        except Exception:
            # The engine did not take it; the same content is offered again at the next poll.
            logger.exception("%s could not be applied", self._path)
            return
        self._seen = text

    async def watch(self) -> None:
        """Polls until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.poll()
