"""One reader of untrusted files under a coverage-guided fuzzer, for as long as wanted: an addition to ``make fuzz``.

    pip install atheris
    python scripts/fuzz_readers.py READER [CORPUS] [-max_total_time=600] [-max_len=4096] ...

Words behind READER are libFuzzer's own. Any exception that is not moebench's own ends the run, and what
did it lies in crash-* in the current folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def readers() -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """Name of the file that a reader is given, and the reader, by the reader's name."""
    from moebench import artefact, hardware, jsonl, model_card, result
    from moebench.checkpoint import files
    from moebench.store.manifest import PackManifest
    from moebench.trace import format as traces
    from moebench.trace import importers, rows

    shape, said = rows.Shape(4), {"model": "m", "source": "s"}
    return {
        "safetensors": ("model.safetensors", files.read_header),
        "config": ("config.json", files.read_json),
        "manifest": ("manifest.json", lambda path: PackManifest.from_json(path.read_bytes().decode("latin-1"))),
        "artefact": ("a.safetensors", artefact.read),
        "trace": ("a.safetensors", traces.load),
        "npz": ("trace.npz", importers.import_npz),
        "csv": ("a.csv", lambda path: rows.import_csv(path, shape, said)),
        "jsonl": ("a.jsonl", lambda path: rows.import_jsonl(path, shape, said)),
        "prompts": ("a.jsonl", jsonl.read_jsonl),
        "geometry": ("a.yaml", model_card.load),
        "hardware": ("a.yaml", hardware.load),
        "result": ("a.json", result.load),
    }


def main(words: list[str]) -> int:
    """Fuzz one reader until something goes wrong or libFuzzer's limits are reached."""
    try:
        import atheris
    except ImportError:
        print("fuzz_readers needs atheris: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["moebench"]):
        known = readers()
        from moebench.errors import MoebenchError
        from moebench.store.engines import StoreError
    if not words or words[0] not in known:
        print(f"fuzz_readers: name one of {', '.join(known)}", file=sys.stderr)
        return 2
    name, read = known[words[0]]
    folder = Path(tempfile.mkdtemp(prefix="moebench-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    (folder / "meta.json").write_text('{"model": "m", "num_experts_per_layer": 4, "phase": "decode only"}')

    def one(content: bytes) -> None:
        (folder / name).write_bytes(content)
        try:
            read(folder / name)
        except (MoebenchError, StoreError):
            return

    atheris.Setup([sys.argv[0], *words[1:]], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
