"""JSON lines: one object a line, with errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moebench.errors import UsageError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; an unreadable line is named."""
    items = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}, line {number}: not JSON ({str(error)[:200]})") from None
            if not isinstance(item, dict):
                raise UsageError(f"{path}, line {number}: expected an object")
            items.append(item)
    return items
