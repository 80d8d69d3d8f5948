"""Every system runs live on families of every kind, and exact ones give the bits of everything resident.

What a system must learn first is fitted here in a few steps, as ``moebench prepare`` fits it.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from family_checkpoints import make_checkpoint

from moebench.backends.torch_model import TorchBackend
from moebench.config import RunConfig, WorkloadConfig
from moebench.engine.loop import Loop
from moebench.harness.assets import load_live, with_drafter
from moebench.harness.passes import Sessions
from moebench.harness.plan import plan
from moebench.plugins import load_plugins
from moebench.systemspec import Target

TOKENS, CHUNK = 6, 4
PROMPTS = ([17, 30, 45, 61, 22, 9, 130], [80, 33, 12])
OPTIONS = {  # where nothing is fitted
    "flashmoe": {"net": "none"},
    "moe_infinity": {"collection": "empty"},
    "bigmomo": {"rho": 1.0},
    "edge0": {"prerouter": False, "lora": False},
}
# each family under two systems, each system under four families: a hybrid, a latent cache and a biased one among them
MATRIX = {
    "qwen2_moe": ("lru", "bigmomo"),
    "qwen3_moe": ("flashmoe", "specprefetch", "edge0"),
    "qwen3_next": ("ssd_llama", "flashmoe", "bigmomo", "slru"),
    "qwen3_5_moe": ("moe_infinity", "edge0", "specprefetch", "belady"),
    "olmoe": ("ssd_llama", "lfu"),
    "mixtral": ("flashmoe", "decayed_lfu"),
    "deepseek_v2": ("moe_infinity", "ssd_llama", "ondemand"),
    "deepseek_v3": ("flashmoe", "bigmomo", "edge0", "specprefetch"),
    "kimi": ("ssd_llama", "moe_infinity"),
    "glm4_moe": ("moe_infinity", "lru"),
    "gpt_oss": ("ssd_llama", "flashmoe", "specprefetch"),
    "granitemoe": ("bigmomo", "random"),
    "phimoe": ("moe_infinity", "edge0"),
    "ernie4_5_moe": ("flashmoe", "specprefetch", "bigmomo"),
    "bailing_hybrid": ("edge0", "moe_infinity", "bigmomo", "ssd_llama"),
    "lfm2_moe": ("specprefetch", "flashmoe", "mmap"),
    "minimax_m2": ("moe_infinity", "slru"),
}
FITTED = {"specprefetch": {"steps": 2, "examples": 2, "rank": 2, "threads": 1},
          "edge0": {"k": 1, "first": 1, "steps_distil": 1, "steps_tune": 1, "steps_onpolicy": 0, "rank": 2,
                    "threads": 1}}  # fmt: skip
DEEPER = {  # three layers of experts, which heads and two layers ahead need
    **{name: {"num_hidden_layers": 4} for name in ("deepseek_v3", "ernie4_5_moe", "bailing_hybrid")},
    **{name: {"num_hidden_layers": 3} for name in ("qwen3_moe", "gpt_oss")},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
}
LEARNED = {("qwen3_5_moe", "edge0"), ("deepseek_v3", "edge0")}


class Desk:
    """One family's checkpoint behind a backend in the default numerics; answers prompts under any system."""

    def __init__(self, name, folder) -> None:
        self.registry, self.name, self.kept = load_plugins(), name, {}
        self.folder = make_checkpoint(name, folder / name, **DEEPER.get(name, {}))
        self.live = load_live(self.folder, name, "int4", "packed")
        self.backend = TorchBackend(self.live.pack, self.live.pack.dense_path, self.live.config)
        self.plain = {type(layer).__name__ for layer in self.backend.cache.layers} == {"DynamicLayer"}

    def answer(self, system, batches, **knobs):
        """Tokens and logits by prompt, the system's own counts, and its fidelity."""
        spec = self.registry.system(system)
        config = RunConfig(
            system, "m4pro", spec.config(**knobs), model=str(self.folder), budget="0.6", chunk=CHUNK,
            workload=WorkloadConfig(requests=2, batch=len(batches[0])), warmup_tokens=0, mode="model",
        )  # fmt: skip
        cell = replace(plan(config, self.registry)[0], clock="wall")  # real reads, whatever the machine
        known = (self.live.pack.manifest.model["weights_hash"], self.live.config, self.backend.selection_bias())
        equipment = spec.equip(config.knobs, Target(self.name, self.live.geometry, *known, trees=self.backend.trees))
        self.backend.adapt(equipment.adapters)
        model, found = with_drafter(self.live, self.backend, equipment.draft), {}

        def work(session):
            loop = Loop(self.backend, session.experts, CHUNK)
            for batch in batches:
                out = loop.generate([PROMPTS[i] for i in batch], TOKENS, keep_logits=True)
                for row, prompt in enumerate(batch):
                    found[prompt] = out.tokens[row], np.stack([step[row] for step in out.logits])
            session.experts.drain()
            session.experts.check_integrity()

        with Sessions(cell, self.registry, model, self.backend, equipment, 16, 0, len(batches[0])) as fresh:
            work(session := fresh(work))
            return found, session.hooks.report(), spec.fidelity(config.knobs)

    def resident(self, batches):
        """Answers with everything in memory."""
        if batches not in self.kept:
            self.kept[batches] = self.answer("resident", batches)[0]
        return self.kept[batches]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Packs and artefacts of this module, apart from everybody's."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("home")
    patch.setenv("MOEBENCH_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module", params=MATRIX)
def desk(request, home, tmp_path_factory):
    return Desk(request.param, tmp_path_factory.mktemp(request.param))


def fitted(desk, system, home):
    """The artefact that ``moebench prepare`` makes, in as few steps as it allows."""
    data = home / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{a} + {a} =", "completion": f" {2 * a}"}) for a in range(9)))
    how = desk.registry.system(system).prepare
    options = how.options(**FITTED[system], data=str(data))
    out = home / "artefacts" / system
    out.mkdir(parents=True, exist_ok=True)
    return how.fit(options, desk.folder, desk.name, out, lambda text, done, total: None)


def test_systems_run_and_exact_ones_keep_every_bit(desk, home):
    for system in MATRIX[desk.name]:
        knobs = OPTIONS.get(system, {})
        if system == "specprefetch" or (desk.name, system) in LEARNED:
            knobs = {"artefact": str(fitted(desk, system, home))}
        # drafts of several sequences need full attention everywhere
        batches = ((0,), (1,)) if system == "bigmomo" and not desk.plain else ((0, 1),)
        answers, counts, fidelity = desk.answer(system, batches, **knobs)
        for prompt, (tokens, logits) in desk.resident(batches).items():
            own, behind = answers[prompt]
            assert len(own) == TOKENS, system
            assert np.isfinite(behind).all(), system
            if fidelity != "altered":
                assert own == tokens, system
                assert np.array_equal(behind, logits), system
        if (desk.name, system) in LEARNED:
            assert counts["predicted_layers"] > 0
            assert counts["dropped"] == 0
