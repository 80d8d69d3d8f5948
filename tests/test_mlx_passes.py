"""Passes under backend=mlx: bits depend neither on the order of arrival, nor on chunks, batches, drafts that were
rejected, or what a slot held before.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from family_checkpoints import make_checkpoint
from mlx_models import MlxServer, make_backend, make_pack
from torch_models import DictServer, run, step_of

from moebench.backends import mlx_probe
from moebench.backends.base import BackendError
from moebench.backends.mlx_experts import owner_of
from moebench.draft import Draft, chain
from moebench.step import ABSENT, VERIFY, Routing, Step
from moebench.store.pages import aligned_buffer

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(2, 300, 9)
WINDOW = RNG.integers(2, 300, 5)


class Lab:
    """One family's checkpoint, pack, backend and server."""

    def __init__(self, family, folder, numerics="row_invariant") -> None:
        self.folder = make_checkpoint(family, folder / "checkpoint", tokenizer=False)
        self.pack = make_pack(self.folder, folder / "pack", "int4")
        self.backend = make_backend(self.folder, self.pack, numerics)
        self.server = MlxServer(self.backend, self.pack)

    def decode(self, tokens, server=None) -> np.ndarray:
        """Logits after every token of one sequence, fed one by one."""
        self.backend.reset(1)
        return np.concatenate([run(self.backend, server or self.server, [[t]], past=[i]) for i, t in enumerate(tokens)])


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    made = {}

    def lab(family):
        if family not in made:
            made[family] = Lab(family, tmp_path_factory.mktemp(family))
        return made[family]

    return lab


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3", "lfm2_moe"])
def test_a_prompt_in_any_chunks_has_the_bits_of_one_token_at_a_time(labs, family):
    lab = labs(family)
    single = lab.decode(PROMPT)
    for chunk in (len(PROMPT), 4):
        lab.backend.reset(1)
        parts = [PROMPT[i : i + chunk] for i in range(0, len(PROMPT), chunk)]
        made = [run(lab.backend, lab.server, [part], past=[i * chunk], all_rows=True) for i, part in enumerate(parts)]
        assert np.array_equal(np.concatenate(made), single)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_sequences_of_a_batch_have_the_bits_of_each_alone(labs, family):
    lab = labs(family)
    texts = [PROMPT, PROMPT[::-1][:4], PROMPT[2:8]]
    alone = [lab.decode(np.append(text, 7))[-2:] for text in texts]
    width = max(map(len, texts))
    tokens, valid = np.zeros((3, width), int), np.zeros((3, width), bool)
    for row, text in enumerate(texts):
        tokens[row, width - len(text) :], valid[row, width - len(text) :] = text, True
    lab.backend.reset(3)
    lab.server.demands.clear()
    first = run(lab.backend, lab.server, tokens, valid=valid)
    second = run(lab.backend, lab.server, np.full((3, 1), 7), past=[len(text) for text in texts])
    assert np.array_equal(np.stack([first, second], 1), np.stack(alone))
    third = run(lab.backend, lab.server, np.full((3, 1), 7), valid=[[True], [False], [True]], past=[10, 5, 7])
    assert np.isfinite(third).all()
    fourth = run(lab.backend, lab.server, np.full((3, 1), 7), past=[11, 5, 8])
    assert np.array_equal(fourth[1], lab.decode(np.append(texts[1], [7, 7]))[-1])  # it had rested, not been padded


def test_the_order_of_arrival_and_a_slot_that_is_overwritten_never_show(labs):
    lab = labs("qwen3_moe")
    lab.backend.reset(1)
    plain = run(lab.backend, lab.server, [PROMPT], all_rows=True)
    for memory in (MlxServer(lab.backend, lab.pack, RNG), DictServer(lab.pack, RNG)):
        lab.backend.reset(1)
        assert np.array_equal(run(lab.backend, memory, [PROMPT], all_rows=True), plain)


def test_experts_are_computed_on_where_they_lie_and_only_foreign_memory_is_copied(labs):
    lab = labs("qwen3_moe")
    views = lab.backend._arithmetic["gate_up_proj"].views
    before = views.copied
    buffer = lab.backend.buffer(3 * lab.pack.slot_bytes)
    assert buffer.ctypes.data % 4096 == 0
    assert owner_of(buffer[lab.pack.slot_bytes :])[1] - owner_of(buffer)[1] == lab.pack.slot_bytes
    run_once = lab.decode(PROMPT[:3])
    assert views.copied == before
    assert owner_of(aligned_buffer(4096)) is None
    assert np.array_equal(lab.decode(PROMPT[:3], DictServer(lab.pack)), run_once)
    assert views.copied == before + 3 * lab.pack.layers * 2 * views.nbytes
    lab.pack.read(0, buffer)
    scales = views(buffer)[1]
    lab.pack.read(1, buffer)  # a slot gets another expert
    other = lab.backend.buffer(lab.pack.slot_bytes)
    lab.pack.read(1, other)
    assert mx.array_equal(scales, views(other)[1]).item()


class Altered(DictServer):
    """Executes another routing than the router's."""

    def __init__(self, *args, change) -> None:
        super().__init__(*args)
        self.change, self.seen = change, []

    def routing(self, layer, native):
        self.seen.append(native)
        return self.change(native)


def test_a_replaced_routing_is_what_runs(labs):
    lab = labs("qwen3_moe")
    lab.backend.reset(1)
    plain = run(lab.backend, lab.server, [PROMPT], all_rows=True)

    def logits(change):
        lab.backend.reset(1)
        server = Altered(lab.pack, change=change)
        return run(lab.backend, server, [PROMPT], all_rows=True), server.seen

    copied, seen = logits(lambda native: Routing(native.experts.copy(), native.weights.copy()))
    assert np.abs(copied - plain).max() < 1e-5  # summed in order of weight instead of the router's own
    assert all((np.diff(native.weights, axis=1) <= 0).all() for native in seen)
    none, _ = logits(lambda native: Routing(np.full_like(native.experts, ABSENT), native.weights))
    zero, _ = logits(lambda native: Routing(native.experts, np.zeros_like(native.weights)))
    assert np.array_equal(none, zero)
    assert not np.allclose(none, plain)
    half, _ = logits(lambda native: Routing(native.experts[:, :1], native.weights[:, :1]))
    gone = lambda native: np.where(np.arange(native.experts.shape[1]) > 0, ABSENT, native.experts)  # noqa: E731
    assert np.array_equal(half, logits(lambda native: Routing(gone(native), native.weights))[0])


def verify(lab, draft, past):
    """Logits of a window: the last accepted token and the nodes of ``draft``."""
    tokens = np.append(WINDOW[0], draft.tokens)
    position = past + np.append(0, draft.depth)
    ones = np.ones(len(tokens), bool)
    step = Step(0, VERIFY, np.zeros(len(tokens), np.int32), position.astype(np.int32), ones, 0, (draft,))
    lab.server.begin(step)
    return lab.backend.forward(step, tokens[None], lab.server, all_rows=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2_moe"])
@pytest.mark.parametrize("kept", [1, 3])
def test_a_chain_is_verified_and_forgotten_as_if_it_had_never_been(labs, family, kept):
    lab = labs(family)
    plain = lab.decode(np.concatenate([PROMPT, WINDOW]))
    after = lab.decode(np.concatenate([PROMPT, WINDOW[:kept], [9, 8]]))[-2:]
    lab.decode(PROMPT)
    assert np.array_equal(verify(lab, chain(WINDOW[1:]), len(PROMPT)), plain[len(PROMPT) :])
    lab.backend.retain(np.arange(5)[None] < kept)
    past = len(PROMPT) + kept
    again = [run(lab.backend, lab.server, [[t]], past=[past + i]) for i, t in enumerate((9, 8))]
    assert np.array_equal(np.concatenate(again), after)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_node_of_a_tree_sees_its_own_path_and_a_branch_can_stay(labs, family):
    lab = labs(family)
    assert lab.backend.trees
    draft = Draft(WINDOW[[1, 2, 3, 4]], [-1, -1, 1, 0], np.ones(4))
    paths = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 2, 3], 4: [0, 1, 4]}
    expected = [lab.decode(np.concatenate([PROMPT, WINDOW[path]]))[-1] for path in paths.values()]
    after = lab.decode(np.concatenate([PROMPT, WINDOW[paths[3]], [9]]))[-1]
    lab.decode(PROMPT)
    assert np.array_equal(verify(lab, draft, len(PROMPT)), np.stack(expected))
    lab.backend.retain(np.isin(np.arange(5), paths[3])[None])
    assert np.array_equal(run(lab.backend, lab.server, [[9]], past=[len(PROMPT) + 3])[0], after)


def test_what_cannot_be_verified_is_refused(labs):
    hybrid = labs("qwen3_next")
    assert not hybrid.backend.trees
    hybrid.decode(PROMPT)
    with pytest.raises(BackendError, match="chains of drafts only"):
        verify(hybrid, Draft(WINDOW[1:3], [-1, -1], np.ones(2)), len(PROMPT))
    sliding = labs("gpt_oss")
    sliding.decode(PROMPT)
    with pytest.raises(BackendError, match="beyond its sliding window of 8 positions"):
        verify(sliding, chain(WINDOW[1:3]), len(PROMPT))


def test_rows_that_do_not_follow_and_servers_that_break_their_word_are_errors(labs):
    lab = labs("qwen3_moe")
    lab.backend.reset(1)
    with pytest.raises(BackendError, match="do not follow the 0 tokens"):
        run(lab.backend, lab.server, [[3]], past=[4])
    with pytest.raises(BackendError, match="do not fit"):
        lab.backend.forward(step_of(np.ones((1, 2), bool)), np.zeros((2, 1), int), lab.server)
    missing = DictServer(lab.pack)
    missing.items = lambda layer, demand: iter(())
    lab.backend.reset(1)
    with pytest.raises(BackendError, match="cover 0 of 4"):
        run(lab.backend, missing, [PROMPT[:2]])
    short = DictServer(lab.pack)
    short.buffers = [buffer[:64] for buffer in short.buffers]
    lab.backend.reset(1)
    with pytest.raises(BackendError, match="shorter than an expert"):
        run(lab.backend, short, [PROMPT[:2]])


def test_the_ledgers_numbers_grow_and_fall(labs):
    lab = labs("qwen3_next")
    lab.backend.reset(1)
    assert lab.backend.kv_bytes() == 0
    run(lab.backend, lab.server, [PROMPT])
    one = lab.backend.kv_bytes()
    lab.backend.reset(2)
    run(lab.backend, lab.server, [PROMPT, PROMPT])
    assert lab.backend.kv_bytes() == 2 * one > 0
    assert lab.backend.stored_dense_bytes < lab.backend.dense_bytes <= 2 * lab.backend.stored_dense_bytes
    assert lab.backend.allocator_peak_bytes() > lab.backend.dense_bytes


def test_kernels_that_depend_on_their_neighbours_are_run_row_by_row(tmp_path, labs, monkeypatch):
    plain = labs("deepseek_v3").decode(PROMPT)
    verdict = mlx_probe.Kernel.verdict
    asked = []

    def unequal(kernel, dtype):
        found = verdict(kernel, dtype)
        asked.append(kernel.name)
        return found if "weighted" in kernel.name else {**found, "equal": False}

    monkeypatch.setattr(mlx_probe.Kernel, "verdict", unequal)
    lab = Lab("deepseek_v3", tmp_path)
    assert {"MoEGate", "Linear", "DeepseekV3Attention", "expert"} <= {name.split()[0] for name in asked}
    calls = []
    attention = type(lab.backend.model.layers[0].self_attn.inner)
    monkeypatch.setattr(attention, "__call__", _counting(attention.__call__, calls))
    lab.backend.reset(1)
    assert np.array_equal(run(lab.backend, lab.server, [PROMPT], all_rows=True), plain)
    assert calls == [1] * len(PROMPT) * 3
    monkeypatch.undo()
    assert all(entry["equal"] for entry in lab.backend.probe_row_invariance().values())


def _counting(call, calls):
    def counted(self, x, *rest):
        calls.append(x.shape[1])
        return call(self, x, *rest)

    return counted


def test_a_probe_notices_a_kernel_that_looks_at_other_rows(labs):
    kernel = mlx_probe.Kernel("mean", 8, lambda x: x - x.mean(0), lambda x: x - x, lambda: None)
    found = kernel.verdict(mx.float32)
    assert not found["equal"]
    assert found["first_unequal_rows"] == 2
    assert found["max_abs_diff"] > 0
