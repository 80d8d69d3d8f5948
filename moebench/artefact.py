"""Files that a system brings: a folder of safetensors files whose header says for what they were made, and a digest.

Written whole or not at all, read with every number checked, found in the user's own folder before the shipped ones.
Knows files and headers; knows no system and no meaning of a tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moebench.errors import UsageError
from moebench.plugins import home
from moebench.scratch import beside, own_folder
from moebench.version import __version__

HEADER = "moebench"
SCHEMA = 1

Tensors = Mapping[str, np.ndarray]


def write(folder: Path, files: Mapping[str, tuple[Mapping[str, Any], Tensors]]) -> Path:
    """Write ``files`` (name -> header, tensors) as ``folder``: a reader finds all old ones, all new ones, or none."""
    from safetensors.numpy import save

    folder.parent.mkdir(parents=True, exist_ok=True)
    with own_folder(beside(folder)) as scratch:
        (new := scratch / "new").mkdir()
        for name, (header, tensors) in files.items():
            said = {**header, "schema": SCHEMA, "digest": digest(tensors)}
            arrays = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
            with open(new / name, "wb") as out:
                out.write(save(arrays, metadata={HEADER: json.dumps(said, sort_keys=True)}))
                out.flush()
                os.fsync(out.fileno())
        if folder.exists():
            folder.rename(scratch / "old")
        new.rename(folder)
    return folder


def read(file: Path, needs: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and tensors; a missing, damaged or foreign file is one line that says what to do."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    header = read_header(file, needs)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, KeyError) as error:
        raise broken(file, f"unreadable ({' '.join(str(error).split())})") from None
    if digest(tensors) != header["digest"]:
        raise broken(file, "its numbers are not those that were written")
    return header, tensors


def read_header(file: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """What a file says of itself, without its tensors; fields in ``needs`` must be there."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            header = json.loads((opened.metadata() or {})[HEADER])
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file; prepare the artefact again") from None
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise broken(file, f"no readable header ({' '.join(str(error).split())})") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise broken(file, f"its schema is not {SCHEMA}")
    if missing := [name for name in (*needs, "digest") if name not in header]:
        raise broken(file, f"its header lacks {', '.join(missing)}")
    return header


def stored(system: str, package: str, file: str, needs: Sequence[str] = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders that hold ``file`` of a system, with its header: the user's own, then those shipped in ``package``.

    One whose header cannot be read is passed over with a warning: it may be of another model.
    """
    for parent in (home() / "artefacts" / system, Path(str(resources.files(package))) / "artefacts"):
        for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
            if folder.name.startswith(".") or not (folder / file).is_file():
                continue
            try:
                yield folder, read_header(folder / file, needs)
            except UsageError as error:
                print(f"moebench: warning: {error}", file=sys.stderr)


def digest(tensors: Tensors) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of tensors, in order of name."""
    total = xxhash.xxh3_128()
    for name, array in sorted(tensors.items()):
        total.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def fitting(name: str, matrix: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix, if it is finite fp16 of this shape; else an error that names it."""
    if matrix is None:
        raise UsageError(f"{name} is missing")
    if matrix.shape != shape or matrix.dtype != np.float16:
        raise UsageError(f"{name} is {matrix.dtype} {matrix.shape}, expected float16 {shape}")
    if not np.isfinite(matrix).all():
        raise UsageError(f"{name} holds numbers that are not finite")
    return matrix


def require_same(system: str, model: str, target: str, pairs: Mapping[str, tuple[Any, Any]], command: str) -> None:
    """Refuse an artefact of ``model`` where it and the run of ``target`` differ in one of ``pairs``, what -> (its, the
    run's); ``command`` makes one that fits.
    """
    for what, (made, wanted) in pairs.items():
        if made != wanted:
            raise UsageError(
                f"{system}: the artefact was made for {model} with {what} {made}, {target} runs with {what} {wanted}; "
                f"make one that fits: {command}"
            )


def made_with(folder: Path, scripts: Sequence[str], packages: Sequence[str]) -> dict[str, dict[str, str]]:
    """For an artefact's provenance: versions of what made it, and hashes of the ``scripts`` in ``folder``."""
    return {
        "versions": {
            "python": platform.python_version(),
            "moebench": __version__,
            **{package: metadata.version(package) for package in packages},
        },
        "scripts": {script: sha256(folder / script) for script in scripts},
    }


def sha256(file: Path) -> str:
    """Of a file's content; one that cannot be read is one line."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def broken(file: Path, what: str) -> UsageError:
    """The error of a file that cannot be used."""
    return UsageError(f"{file}: {what}; prepare or import the artefact again")
