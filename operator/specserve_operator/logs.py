"""How the operator logs: one JSON object a line for machines, or text for people."""

import logging
import sys
from enum import StrEnum

from pythonjsonlogger.json import JsonFormatter


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


def configure_logs(log_format: LogFormat, level: str) -> None:
    """Sends all logs to standard error. Libraries are heard from warnings on, unless everything is."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format is LogFormat.JSON:
        fields = ["asctime", "levelname", "name", "message"]
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(fields, rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if level != "DEBUG":
        for library in ("kopf", "asyncio", "aiohttp", "kubernetes", "grpc"):
            logging.getLogger(library).setLevel(logging.WARNING)
