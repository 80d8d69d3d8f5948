"""One way to read a YAML file that somebody else may have written. Knows nothing of what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is several times faster
LARGEST = 1 << 20  # bytes


def read_yaml(path: str | Path) -> Any:
    """Plain data of a YAML file; raises ``ValueError``, one line with the path, where it is none."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"larger than {LARGEST >> 20} MiB")
        return yaml.load(content, LOADER)
    except (OSError, yaml.YAMLError, ValueError, ArithmeticError, RecursionError, LookupError, TypeError) as error:
        # what PyYAML lets through of dates, numbers and keys that cannot be
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        kind = "" if isinstance(error, OSError) else " is not YAML"
        raise ValueError(f"{path}{kind}: {' '.join(text.split())[:300]}") from None
