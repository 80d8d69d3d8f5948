"""SSD-LLaMA, one mechanism changed at a time: requests and MiB a token, effective GB/s, ms a token.

    python benchmarks/ssd_llama_ablation.py model kimi-k2.7-code|deepseek-v4-flash|glm-5.2|... [hw=...] [budget=...]
    python benchmarks/ssd_llama_ablation.py host [rounds=3] [limit=2.5GiB] [only=NAME,...]

``model`` replays on a modeled machine with a card (rtx5090_32gb; hw=paper is the same with the paper's 9 GiB/s drive
and, where ram=N says so, N GiB of RAM). ``host`` measures on this machine: packs of several GiB of random experts are
written under MOEBENCH_HOME, one for each layout and codec, and read back on the wall clock, arms interleaved, each in
a process of its own whose memory, page cache included, is limited (cgroup v1). Options of ``moebench run`` hold for all
arms, only=NAME,... chooses some. Medians are printed; the last line is one JSON document.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
from importlib import resources
from pathlib import Path

import yaml

import moebench
from moebench import geometry, machine
from moebench.budget import parse_bytes
from moebench.harness.isolate import isolated
from moebench.units import GB, GIB, MIB

ARMS: dict[str, dict[str, str]] = {  # name: options of the run
    "as the paper": {},
    "layout: packed_gate_up": {"layout": "packed_gate_up"},
    "layout: packed_gate": {"layout": "packed_gate"},
    "layout: scattered": {"layout": "scattered"},
    "granularity: gate_up": {"system.granularity": "gate_up"},
    "granularity: gate": {"system.granularity": "gate"},
    "granularity: none": {"system.granularity": "none"},
    "granularity: none, tiers: two": {"system.granularity": "none", "system.tiers": "two"},
    "codec: rans": {"codec": "rans"},
    "engine: uring": {"engine": "uring"},
    "engine: pread": {"engine": "pread"},
    "engine: mmap": {"engine": "mmap"},
    "mmap and scattered": {"engine": "mmap", "layout": "scattered"},
    "tiers: two": {"system.tiers": "two"},
    "no temporary slots": {"system.temporary": "0"},
    "promote_after: 1": {"system.promote_after": "1"},
    "score: frequency": {"system.score": "frequency"},
    "score: recency": {"system.score": "recency"},
    "score: recency, no temporary": {"system.score": "recency", "system.temporary": "0"},
    "pool: 1": {"system.pool": "1"},
    "pool: no bound": {"system.pool": "0"},
    **{f"placement: {n} on host": {"system.placement": str(n)} for n in (1, 2, 4, 6)},
    "placement: auto": {"system.placement": "auto"},
    "system lru, whole prompt": {"system": "lru", "chunk": "4096"},
    "system mmap, scattered": {"system": "mmap", "layout": "scattered", "engine": "mmap", "device_budget": "auto"},
}
MODELED_ONLY = ("placement",)
BUDGET = {"kimi-k2.7-code": "50GiB", "deepseek-v4-flash": "50GiB", "glm-5.2": "46GiB"}
WORKLOAD = {"workload.requests": 1, "workload.prompt_tokens": 32, "workload.new_tokens": 80, "warmup_tokens": 16}
HOST = {  # the model named here lends its name alone: ssd_llama_host.yaml is read
    "hw": "host", "model": "deepseek-v4-flash", "budget": "0.35", "device_budget": "0.5", "quality": "none",
    "workload.new_tokens": 56,
}  # fmt: skip
CGROUPS = Path("/sys/fs/cgroup/memory")
COLUMNS = ("requests", "MiB", "GB/s", "GB/s read", "ms", "stall ms", "hits", "first s")


def numbers(found: dict[str, float | None]) -> dict[str, float | None]:
    """The columns of one run from its metrics; ``GB/s read`` is bytes over the time the loop waited for them."""
    mib, rate, stall = (found.get(n) for n in ("ssd_mib_per_token", "decode_tok_s", "stall_ms_per_token"))
    return {
        "requests": found.get("storage_requests_per_token"),
        "MiB": mib,
        "GB/s": found.get("effective_gb_s"),
        "GB/s read": mib * MIB / GB / (stall * 1e-3) if mib and stall else None,
        "ms": 1e3 / rate if rate else None,
        "stall ms": stall,
        "hits": found.get("hit_rate"),
        "first s": found.get("ttft_s"),
    }


# --- a modeled machine -------------------------------------------------------------------------------------------


def paper_machine(ram: str) -> None:
    """Register ``hw=paper`` in a home of this process: the card's profile with the paper's drive and memory."""
    profile = yaml.safe_load(resources.files("moebench.hardware_profiles").joinpath("rtx5090_32gb.yaml").read_text())
    curve, peak = profile["read_curve"], 9 * GIB / GB
    curve["rows"] = [
        [round(min(peak, depth * kib * 1024 / GB / (60e-6 + kib * 1024 / GB / peak)), 4) for depth in curve["depths"]]
        for kib in curve["sizes_kib"]
    ]
    curve["source"] = "estimate: the law of rtx5090_32gb with the 9 GiB/s of the drive in arXiv 2609.18110"
    profile |= {"id": "paper", "title": "Desktop of SSD-LLaMA", "read_curve": curve, "match": {}}
    if ram:
        profile["memory"]["ram_gib"] = {"value": float(ram), "unit": "GiB", "source": "paper: arXiv 2609.18110"}
    home = Path(tempfile.mkdtemp(prefix="ssd-llama-"))
    (home / "hardware").mkdir()
    (home / "hardware" / "paper.yaml").write_text(yaml.safe_dump(profile))
    os.environ["MOEBENCH_HOME"] = str(home)


def modeled(model: str, options: dict[str, str]) -> dict[str, dict]:
    """All arms on a modeled machine."""
    hw, ram, only = options.pop("hw", "rtx5090_32gb"), options.pop("ram", ""), options.pop("only", "")
    if hw == "paper":
        paper_machine(ram)
    common = {"hw": hw, "model": model, "budget": BUDGET.get(model, "0.25"), "stack": "native", "quality": "none"}
    found = {}
    print(f"{hw} {ram}  {model}  {' '.join(f'{k}={v}' for k, v in {**common, **options}.items())}")
    header()
    for name, arm in chosen(only):
        row, *_ = moebench.run(**{"system": "ssd_llama", **common, **WORKLOAD, **options, **arm})
        if row.status != "ok":
            print(f"{name:32}{row.error}", flush=True)
            continue
        found[name] = numbers({key: metric.value for key, metric in row.metrics.items()})
        found[name]["split"] = row.protocol["counters"].get("host_split", 0)
        line(name, [found[name]])
    return found


# --- this machine ------------------------------------------------------------------------------------------------


def measure(options: dict[str, str], limit: int) -> dict[str, float | None]:
    """One arm in this process, whose memory is limited first; decode steps after warm-up."""
    limit_memory(limit)
    from moebench.commands import compose
    from moebench.engine.loop import replay
    from moebench.harness import figures
    from moebench.harness.cell import load_trace
    from moebench.harness.environment import page_cache_state
    from moebench.harness.matrices import by_matrix
    from moebench.harness.plan import plan
    from moebench.harness.random_pack import random_pack
    from moebench.harness.session import open_session
    from moebench.plugins import load_plugins

    registry = load_plugins()
    compose.register_groups(registry)
    words = [f"{key}={value}" for key, value in {"system": "ssd_llama", **WORKLOAD, **HOST, **options}.items()]
    (cell,) = plan(compose.resolve(words, registry), registry)
    cell = dataclasses.replace(cell, geometry=geometry.load(Path(__file__).with_name("ssd_llama_host.yaml")))
    shape, trace = cell.geometry, load_trace(cell)
    if cell.spec.handling(cell.config.knobs).matrices:
        shape, trace = by_matrix(shape, trace, cell.config.layout, cell.config.codec)
    pack = random_pack(shape, cell.config.layout, cell.config.codec, print)
    if not limit:
        return {}  # the pack is there
    page_cache_state(cell, pack)
    session = open_session(
        cell, shape, registry, pack=pack, dense_bytes=0, kv_bytes=lambda: 0, warmup_tokens=cell.config.warmup_tokens,
        longest_prompt=0,
    )  # fmt: skip
    try:
        replay(trace, session.experts, 1, cell.config.chunk)
    finally:
        session.close()
    found = numbers({name: value for name, (value, *_) in session.metrics.numbers().items()})
    # What the page cache served is asked of an engine all the same.
    return found | dict.fromkeys(COLUMNS[:4]) if cell.engine in figures.THROUGH_PAGE_CACHE else found


def limit_memory(limit: int) -> None:
    """Put this process into a memory control group of its own; ``limit`` 0 leaves it where it is."""
    if limit:
        group = CGROUPS / f"moebench-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))


def host(options: dict[str, str]) -> dict[str, dict]:
    """All arms on this machine, in rounds of shuffled order; medians."""
    import ssd_llama_ablation as this  # so that another process finds the function

    rounds, limit, only = int(options.pop("rounds", 3)), options.pop("limit", "2.5GiB"), options.pop("only", "")
    if not os.access(CGROUPS, os.W_OK):
        raise SystemExit("this needs a memory control group (cgroup v1) that this user may write to")
    arms = [(n, {**options, **arm}) for n, arm in chosen(only) if not n.startswith(MODELED_ONLY)]
    for _, arm in arms:
        isolated(this.measure, arm, 0)  # packs are written outside the limit
    runs: dict[str, list[dict]] = {name: [] for name, _ in arms}
    for _ in range(rounds):
        for name, arm in random.sample(arms, len(arms)):
            runs[name].append(isolated(this.measure, arm, parse_bytes(limit, "limit")))
            print(f"{name}: {runs[name][-1]['ms']:.4g} ms", file=sys.stderr)
            for group in CGROUPS.glob("moebench-*"):
                group.rmdir()
    print(f"host  {machine.environment()['cpu']}  limit {limit}  {rounds} rounds, median (ms: lowest and highest)")
    header()
    found = {}
    for name, several in runs.items():
        found[name] = line(name, several)
    return found


# --- table -------------------------------------------------------------------------------------------------------


def chosen(only: str) -> list[tuple[str, dict[str, str]]]:
    """The arms whose name begins with one of ``only``; all without."""
    return [(n, arm) for n, arm in ARMS.items() if not only or n.startswith(tuple(only.split(",")))]


def header() -> None:
    """Column names."""
    print(f"{'':32}" + "".join(f"{name:>11}" for name in COLUMNS))


def line(name: str, several: list[dict]) -> dict:
    """Print the median of several runs of one arm, and return it."""
    values = {}
    for column in COLUMNS:
        known = [run[column] for run in several if run[column] is not None]
        values[column] = statistics.median(known) if known else None
    text = "".join(f"{'-' if values[c] is None else format(values[c], '.4g'):>11}" for c in COLUMNS)
    spread = [run["ms"] for run in several]
    more = f"   {min(spread):.4g} to {max(spread):.4g}" if len(several) > 1 else ""
    more += f"   split {several[0]['split']}" if several[0].get("split") else ""
    print(f"{name:32}{text}{more}", flush=True)
    return values


def main(words: list[str]) -> None:
    """Dispatch, and print the JSON document."""
    kind, rest = words[0], words[1:]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    found = host(options) if kind == "host" else modeled(rest[0], options)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
