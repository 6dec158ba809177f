"""Plain text in the manner of kubectl: ages, aligned tables, aligned pairs. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

NONE = "<none>"
UNKNOWN = "<unknown>"
_COLUMN_GAP = 3


def parse_time(text: str | None) -> datetime | None:
    """An RFC 3339 time as Kubernetes writes it; None where there is none or it is no time."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_duration(seconds: float) -> str:
    """A duration with two significant parts at most: `5s`, `3m20s`, `2h`, `47h`, `3d4h`, `2y`."""
    total = int(seconds)
    if total < 0:
        return "<invalid>" if total < -1 else "0s"
    minutes, hours, days = total // 60, total // 3600, total // 86_400
    years = days // 365
    # (upper limit in seconds, coarse part, fine part): the fine part is left out where it is zero or None.
    steps = (
        (120, f"{total}s", None),
        (600, f"{minutes}m", (total % 60, "s")),
        (3 * 3600, f"{minutes}m", None),
        (8 * 3600, f"{hours}h", (minutes % 60, "m")),
        (48 * 3600, f"{hours}h", None),
        (8 * 86_400, f"{days}d", (hours % 24, "h")),
        (2 * 365 * 86_400, f"{days}d", None),
        (8 * 365 * 86_400, f"{years}y", (days % 365, "d")),
    )
    for limit, coarse, fine in steps:
        if total < limit:
            return f"{coarse}{fine[0]}{fine[1]}" if fine and fine[0] else coarse
    return f"{years}y"


def format_age(since: str | None, now: datetime) -> str:
    """The time from an RFC 3339 time to `now`."""
    moment = parse_time(since)
    return UNKNOWN if moment is None else format_duration((now - moment).total_seconds())


def format_bytes(count: int) -> str:
    """Binary multiples with one decimal: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of left-aligned columns. Every row has as many cells as the header; the last is not padded."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    padded = ([cell.ljust(width + _COLUMN_GAP) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return ["".join(row).rstrip() for row in padded]


def ruled_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose header is underlined, as in `kubectl describe`."""
    return table(header, [["-" * len(name) for name in header], *rows])


def pairs(items: Sequence[tuple[str, str]]) -> list[str]:
    """Lines `Key:   value` with the values aligned. A value of several lines continues below itself."""
    width = max((len(key) for key, _ in items), default=0) + len(":  ")
    lines: list[str] = []
    for key, value in items:
        first, *rest = value.split("\n")
        lines.append(f"{key + ':':<{width}}{first}".rstrip())
        lines.extend(" " * width + line for line in rest)
    return lines


def indent(lines: Sequence[str], by: int = 2) -> list[str]:
    """The lines moved right."""
    return [" " * by + line if line else line for line in lines]
