"""Logs of a pod's processes in one form, and the first failure among them kept for the pod's last line.

The engine runs in processes of its own and tells the server only that it failed, not why. Every process of it loads the
logging configuration that is written here, whose second handler notes the first logged exception in a file.
"""

import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

FAILURE_VARIABLE: Final = "SPECSERVE_FAILURE_FILE"
_CONFIG_VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
_OWN_LOGGERS: Final = ("specserve_workers", "uvicorn")


class FirstFailureHandler(logging.Handler):
    """Writes the first exception that any process logs into the file that `FAILURE_VARIABLE` names."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        path = os.environ.get(FAILURE_VARIABLE)
        if error is None or not path:
            return
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(describe_error(error))


def describe_error(error: BaseException) -> str:
    """An error in a line; of a failed validation only what was wrong, without the input."""
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors(include_input=False, include_url=False))
    return f"{type(error).__name__}: {error}"


class FailureNote:
    """The note of the first failure, read by the server."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def clear(self) -> None:
        """Forgets what did not keep the engine from starting."""
        self._path.unlink(missing_ok=True)


@contextmanager
def engine_logs() -> Iterator[FailureNote]:
    """Configures logging here and in the processes to come. A configuration that the user names is left alone."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG, configure_logging

    with tempfile.TemporaryDirectory(prefix="specserve-") as folder:
        note = FailureNote(Path(folder) / "failure")
        os.environ[FAILURE_VARIABLE] = str(Path(folder) / "failure")
        if _CONFIG_VARIABLE not in os.environ:
            config = logging_config(DEFAULT_LOGGING_CONFIG)
            path = Path(folder) / "logging.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            os.environ[_CONFIG_VARIABLE] = str(path)
        # Reads the variable, as every process of the engine does.
        configure_logging(LoggingConfig())
        yield note


def logging_config(engine_config: dict[str, Any]) -> dict[str, Any]:
    """The engine's own configuration with our loggers and the failure note added."""
    config = copy.deepcopy(engine_config)
    config["handlers"]["specserve_failure"] = {
        "class": f"{FirstFailureHandler.__module__}.{FirstFailureHandler.__qualname__}",
        "level": "ERROR",
    }
    engine_logger = config["loggers"]["vllm"]
    engine_logger["handlers"] = [*engine_logger["handlers"], "specserve_failure"]
    for name in _OWN_LOGGERS:
        config["loggers"][name] = dict(engine_logger)
    return config
