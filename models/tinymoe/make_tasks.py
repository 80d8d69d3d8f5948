"""Write the five local tasks and the held-out prompts as JSON lines, all from the test side of the generators.

    python -m moebench.models.tinymoe.make_tasks DIR

Deterministic. ``<domain>.jsonl`` holds 100 full-length items each; ``prompts.jsonl`` 40 further ones, domains in turn,
for timing runs and traces.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from moebench.models.tinymoe.domains import DOMAINS, Item, generate

ITEMS_PER_TASK = 100
PROMPTS_PER_DOMAIN = 8


def draw(domain: str, count: int, seed: str, taken: set[str]) -> list[Item]:
    """``count`` different full-length test items whose prompts are not in ``taken``; adds them to it."""
    rng, items = random.Random(f"{seed}/{domain}"), []
    while len(items) < count:
        item = generate(domain, rng, test=True)
        if item.prompt not in taken:
            taken.add(item.prompt)
            items.append(item)
    return items


def write(path: Path, items: list[Item]) -> None:
    """One JSON object a line: domain, prompt, answer and the whole completion."""
    lines = [
        json.dumps({"domain": i.domain, "prompt": i.prompt, "answer": i.answer, "completion": i.completion})
        for i in items
    ]
    path.write_text("\n".join(lines) + "\n")


def main(folder: Path) -> None:
    """Write all files into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for domain in DOMAINS:
        write(folder / f"{domain}.jsonl", draw(domain, ITEMS_PER_TASK, "tasks", taken))
    held_out = [draw(domain, PROMPTS_PER_DOMAIN, "prompts", taken) for domain in DOMAINS]
    write(folder / "prompts.jsonl", [item for turn in zip(*held_out, strict=True) for item in turn])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
