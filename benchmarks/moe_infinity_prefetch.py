"""What MoE-Infinity's prefetch is worth: with it off, as its own main branch has it, and on.

    python benchmarks/moe_infinity_prefetch.py HW MODEL [KEY=VALUE ...]

HW is a hardware profile, MODEL a geometry (a synthetic trace of it, or workload=trace workload.path=FILE), or tinymoe.
Further options are those of ``moebench run`` and hold for all rows. The first row is the cache alone (lru), then each
replacement without and with prefetch, then what prefetch is worth without earlier requests and with masked rows.
Precision is the share of reads ahead that were used, coverage the share of would-be misses that were there or under
way.
"""

from __future__ import annotations

import sys

import moebench

SYSTEMS = (
    {},
    {"replace": "lru", "prefetch": "false"},
    {"replace": "lru"},
    {"replace": "lru", "ahead": "2"},
    {"replace": "activation", "prefetch": "false"},
    {"replace": "activation"},
    {"replace": "incache", "prefetch": "false"},
    {"replace": "incache"},
    {"replace": "incache_decayed", "prefetch": "false"},
    {"replace": "lru", "match": "masked"},
    {"replace": "lru", "match": "off"},
)
COLUMNS = {
    "decode_tok_s": "tok/s",
    "stall_ms_per_token": "stall ms",
    "hit_rate": "hits",
    "ssd_mib_per_token": "MiB/tok",
}


def main(hw: str, model: str, words: list[str]) -> None:
    """Print one line per arm."""
    common = dict(word.split("=", 1) for word in words)
    print(f"{hw}  {model}  {' '.join(words)}")
    print(f"{'':44}" + "".join(f"{name:>10}" for name in (*COLUMNS.values(), "precision", "coverage")))
    for knobs in SYSTEMS:
        own = {f"system.{name}": value for name, value in knobs.items()}
        if not knobs.get("prefetch") and knobs and common.get("collection"):
            own |= {"system.collection": common["collection"]}
        rest = {name: value for name, value in common.items() if name != "collection"}
        system = "moe_infinity" if knobs else "lru"
        (row, *_) = moebench.run(system=system, hw=hw, model=model, **{"quality": "none", **rest, **own})
        name = " ".join(f"{k}={v}" for k, v in knobs.items()) or "lru, the baseline"
        if row.status != "ok":
            print(f"{name:44}{row.error}")
            continue
        counters = row.protocol["counters"]
        values = [row.metrics[column].value for column in COLUMNS]
        values += [counters.get("precision"), counters.get("coverage") if counters.get("prefetched") else None]
        print(f"{name:44}" + "".join(f"{'-' if v is None else format(v, '.3g'):>10}" for v in values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
