"""``moebench model random|smollm2-moe``: model folders that moebench makes itself. Knows the sub-commands by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from moebench.errors import unknown

SUBCOMMANDS = {  # name -> what it makes; its module in this package is the name with underscores
    "random": "random weights in the sizes of any geometry, for work on storage",
    "smollm2-moe": "experts made of a small language model that answers",
}
MODULES = {"random": "random_model"}


def main(words: Sequence[str]) -> int:
    """Dispatch to one sub-command; each prints one JSON line last."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: moebench model SUBCOMMAND KEY=VALUE ...\n")
        for name, text in SUBCOMMANDS.items():
            print(f"  {name:<12} {text}")
        return 0 if words else 2
    if words[0] not in SUBCOMMANDS:
        raise unknown("model subcommand", words[0], SUBCOMMANDS)
    name = MODULES.get(words[0], words[0].replace("-", "_"))
    return int(importlib.import_module(f"moebench.commands.{name}").main(words[1:]))
