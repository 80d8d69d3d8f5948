"""Models by the name they have on the Hugging Face hub, looked up in the cache that its own tools fill.

Never asks the network. Layout of the cache: ``models--ORG--NAME/refs/main`` names a folder under ``snapshots``
(huggingface_hub's documentation, "Understand caching").
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from moebench.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_folder() -> Path:
    """``HF_HUB_CACHE``, else ``hub`` under ``HF_HOME``, else ``~/.cache/huggingface/hub`` (``XDG_CACHE_HOME``)."""
    if found := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(found).expanduser()
    home = os.environ.get("HF_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return base.expanduser() / "hub"


def find_model(word: str) -> Path:
    """The folder that ``model=`` names: a path, or ``org/name`` in the hub's cache. Errors say where it was sought."""
    folder = Path(word).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or not NAME.fullmatch(word):
        what = "it has none" if folder.is_dir() else "it is a file" if folder.exists() else "it does not exist"
        raise UsageError(f"model={word} is no model folder with config.json: {what}")
    cache = cache_folder() / f"models--{word.replace('/', '--')}"
    hint = f"get it with: hf download {word}"
    try:
        revision = (cache / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"model={word} is neither a folder nor in the hub cache ({cache}); {hint}") from None
    if not re.fullmatch(r"(?!\.+$)[\w.-]+", revision):
        raise UsageError(
            f"model={word} is damaged in the hub cache: {cache / 'refs' / 'main'} names no revision; {hint}"
        )
    snapshot = cache / "snapshots" / revision
    if not os.path.isfile(snapshot / "config.json"):
        raise UsageError(f"model={word} is incomplete in the hub cache: {snapshot} has no config.json; {hint}")
    if missing := _missing(snapshot):
        raise UsageError(f"model={word} is incomplete in the hub cache: {snapshot} lacks {missing}; {hint}")
    return snapshot


def model_name(folder: str | Path) -> str:
    """The name of a model in tables: ``org/name`` of a folder in a hub cache, else the folder's own."""
    folder = Path(folder).absolute()
    parts = folder.parent.parent.name.split("--", 2)
    if folder.parent.name == "snapshots" and len(parts) == 3 and parts[0] == "models":
        return f"{parts[1]}/{parts[2]}"
    return folder.resolve().name


def _missing(snapshot: Path) -> str:
    """The first weight file that the snapshot should hold and does not."""
    index = snapshot / "model.safetensors.index.json"
    if (snapshot / "model.safetensors").is_file():
        return ""
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except OSError:
        return "" if any(snapshot.glob("model*.safetensors")) else "model.safetensors"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""  # said when the folder is read
    named = [file for file in files if isinstance(file, str) and file == Path(file).name]  # others: said when read
    return next((file for file in named if not os.path.isfile(snapshot / file)), "")
