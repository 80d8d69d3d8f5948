"""``moebench calibrate``: measure this machine's storage, memory, compute and loop into the profile ``hw=host``."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from moebench import hardware
from moebench.checkpoint.hub import find_model, model_name
from moebench.commands.places import writable_file, writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.geometry import EMBEDDED, embedded_folder
from moebench.hardware import HardwareProfile
from moebench.harness.isolate import WAITING
from moebench.machine import detect
from moebench.plugins import home
from moebench.progress import progress_bar
from moebench.scratch import whole_file
from moebench.units import GIB


@dataclass(frozen=True)
class CalibrateOptions:
    """How long to measure and where."""

    seconds: float = option(
        160.0, "time to measure; libraries, the file and a run of each system take two minutes more"
    )
    dir: str = option(".", "folder on the drive to measure; a temporary file is written there")
    file_gib: float = option(1.0, "size of that file")
    model: str = option(EMBEDDED, "model whose layers are measured: tinymoe, a folder, or org/name in the hub cache")
    device: Literal["cpu", "cuda"] = option(
        "cpu",
        "what runs on the profile compute on: the processor, or the CUDA device, with its memory, link and kernels",
    )
    out: str = option("", "profile to write; empty for hardware/host.yaml in moebench's configuration folder")

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 3600 or not 0.05 <= self.file_gib <= 64:
            raise UsageError("calibrate: seconds must be 1 to 3600 and file_gib 0.05 to 64")
        if not Path(self.dir).is_dir():
            raise UsageError(f"calibrate: dir={self.dir} is not a folder")
        if self.device == "cuda":
            from moebench.backends.cuda_state import refusal

            if (reason := refusal()) is not None:
                raise UsageError(f"calibrate: device=cuda: {reason}")


def main(words: Sequence[str]) -> int:
    """Measure, check the profile as any other, write it whole; the last line is one JSON document."""
    options = parse(words, CalibrateOptions, "calibrate")
    if options is None:
        return 0
    folder = embedded_folder() if options.model == EMBEDDED else find_model(options.model)
    if options.out:
        out = writable_file(options.out)
    else:
        out = writable_folder(home() / "hardware", "moebench's configuration folder") / "host.yaml"
    writable_folder(options.dir, "dir")
    data = _measured(options, folder)
    profile = hardware.from_dict(data, str(out))
    with whole_file(out) as file:
        file.write(yaml.safe_dump(data, sort_keys=False, width=10_000, default_flow_style=None).encode())
    _show(profile)
    print(
        json.dumps({"profile": str(out), "hw": profile.id, "unmeasured": [*profile.unmeasured]}, separators=(",", ":"))
    )
    return 0


def _measured(options: CalibrateOptions, folder: Path) -> dict[str, Any]:
    """The profile as plain data."""
    os.environ.update({**WAITING, **os.environ})  # as runs have it, before torch is loaded
    from moebench.harness.assets import load_live
    from moebench.probes import host
    from moebench.probes.record import Record

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = EMBEDDED if options.model == EMBEDDED else model_name(folder)
    with progress_bar() as bar:
        task = bar.add_task("calibrating", total=1.0)
        record = Record(date, options.seconds, lambda share, what: bar.update(task, advance=share, description=what))
        where = host.Where(
            Path(options.dir), int(options.file_gib * GIB), lambda: load_live(folder, name, "int4", "packed")
        )
        data = host.measure(where, record)
        if options.device == "cpu":
            return data
        from moebench.harness.backend import open_device
        from moebench.probes import device

        return device.extend(data, open_device(options.device), detect().gpu, record)


def _show(profile: HardwareProfile) -> None:
    """A line for each value, and what could not be measured."""
    stack = profile.constants()
    numbers = profile.quantities | {f"{stack.name}.{key}": q for key, q in stack.quantities.items()}
    for name, quantity in numbers.items():
        print(f"{name:<32} {quantity.describe()}")
    for name, curve in {"read_curve": profile.read_curve, **profile.curves}.items():
        print(f"{name:<32} {curve.describe()}")
    print(f"{'random reads, best':<32} {max(map(max, profile.read_curve.rows)):g} GB/s")
    for name, why in profile.unmeasured.items():
        print(f"not measured: {name}: {why}")
