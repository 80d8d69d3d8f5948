"""Routing made up from stated statistics: popularity, topics, recency and links between layers, all from one seed.

A token's slots hold *concepts*; each layer owns a fixed permutation from concepts to experts. A slot either repeats
what it held a few tokens ago (recency) or draws a new concept from the layer's Zipf law (popularity), read through the
permutation of the current topic or through the one that all topics share. A slot of one layer may follow the same slot
of the layer before: it then repeats or draws alike. Knows no model. Whatever decides is integer arithmetic, so that a
seed gives the same trace on every machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from moebench.step import DECODE, PREFILL
from moebench.trace.draws import Draws
from moebench.trace.format import Trace

BLOCK = 64  # steps drawn at a time, to bound memory
UNIT = 1 << 16  # resolution of probabilities
DRAWS = 1 << 14  # resolution of the Zipf laws
SIZES = ("layers", "experts", "top_k", "sequences", "prefill", "decode", "seed", "text")
FITTED_TO = {
    "previous-token recall 35.4 % (Qwen3.6-35B-A3B)": "github.com/Helldez/BigMoeOnEdge docs/expert-prediction.md",
    "at 48x128: token overlap 42.7 % (Qwen3-30B-A3B)": "github.com/gajsanders/moe-trace docs/findings/006",
    "at 48x128: unique experts in 8/32/128 tokens 29.0/52.8/75.2 (Qwen3-30B)": "github.com/everett6/moe-prefetch r6",
}


@dataclass(frozen=True)
class SyntheticSpec:
    """What a synthetic trace is made of; the defaults are fitted to ``FITTED_TO``.

    ``skew`` is the mean Zipf exponent (0 = uniform), ``skew_spread`` its relative spread over layers, ``shift`` what is
    added to ranks, as a share of the experts (Mandelbrot's law: a flat head), ``reach`` the share of a layer's experts
    that one topic draws from. ``persistence`` is the share of slots that repeat what they held d tokens ago, d in
    1..``memory`` with weight 1/d. Sequences roam among ``topics_per_sequence`` of ``topics`` topics, redrawn with
    probability ``topic_rate`` a token; ``topic_share`` of new draws are the topic's, the rest are common to all.
    ``layer_link`` is the share of slots that follow the layer before. Each of ``sequences`` has ``prefill`` then
    ``decode`` tokens. ``seed`` stands for the model; another ``text`` gives the same model other requests to answer.
    """

    layers: int = 40
    experts: int = 256
    top_k: int = 8
    sequences: int = 8
    prefill: int = 64
    decode: int = 192
    skew: float = 1.15
    skew_spread: float = 0.5
    shift: float = 0.0
    reach: float = 0.35
    persistence: float = 0.28
    memory: int = 4
    topics: int = 16
    topics_per_sequence: int = 2
    topic_rate: float = 0.01
    topic_share: float = 0.8
    layer_link: float = 0.75
    seed: int = 0
    text: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "sequences", "memory", "topics", "topics_per_sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"synthetic trace: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("skew_spread", "shift", "reach", "persistence", "topic_rate", "topic_share", "layer_link"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"synthetic trace: {name} must lie in 0..1, got {getattr(self, name)}")
        if self.top_k > self.experts or self.experts > 4096:
            raise ValueError(f"synthetic trace: top_k {self.top_k} <= experts {self.experts} <= 4096 does not hold")
        if self.drawn < self.top_k:
            raise ValueError(f"synthetic trace: reach {self.reach} leaves {self.drawn} experts for top_k {self.top_k}")
        if self.topics_per_sequence > self.topics:
            raise ValueError(f"synthetic trace: topics_per_sequence exceeds the {self.topics} topics")
        if self.text < 0:
            raise ValueError(f"synthetic trace: text must be at least 0, got {self.text}")
        if not 0 <= self.skew <= 4 or self.prefill < 0 or self.decode < 0 or not self.prefill + self.decode:
            raise ValueError("synthetic trace: skew must lie in 0..4, and prefill + decode be at least one token")

    @property
    def drawn(self) -> int:
        """Experts of a layer that one topic draws from."""
        return round(self.reach * self.experts)


def uniform(spec: SyntheticSpec) -> Trace:
    """The control: top_k distinct experts, uniform and independent; uses only the sizes and the seed of ``spec``."""
    draw = Draws(spec.seed)
    tokens = spec.sequences * (spec.prefill + spec.decode)
    shape = (tokens, spec.layers)
    experts = np.empty((*shape, spec.top_k), np.int64)
    for slot, last in enumerate(range(spec.experts - spec.top_k, spec.experts)):  # Floyd's sampling without replacement
        pick = draw.below(last + 1, shape)
        taken = (experts[..., :slot] == pick[..., None]).any(axis=-1)
        experts[..., slot] = np.where(taken, last, pick)
    shuffle = draw.raw(experts.shape).argsort(axis=-1, kind="stable")
    return _trace(spec, np.take_along_axis(experts, shuffle, axis=-1), draw, "uniform i.i.d. 1")


def synthesize(spec: SyntheticSpec) -> Trace:
    """Generate a trace; the same spec gives the same hash everywhere."""
    draw = Draws(spec.seed)
    steps, lanes, layers, k = spec.prefill + spec.decode, spec.sequences, spec.layers, spec.top_k
    to_expert = draw.permutations(layers, spec.experts)
    by_topic = draw.permutations(spec.topics, spec.experts)
    own_topics = draw.permutations(lanes, spec.topics)[:, : spec.topics_per_sequence]
    zipf = _zipf_tables(spec, draw)
    if spec.text:
        draw = Draws([spec.seed, spec.text])
        own_topics = draw.permutations(lanes, spec.topics)[:, : spec.topics_per_sequence]
    lags = _lag_table(spec)
    topic = own_topics[:, 0].copy()
    concepts = np.empty((steps, lanes * layers * k), np.int16)
    seen = np.zeros((lanes * layers, spec.experts), np.int16)
    for start in range(0, steps, BLOCK):
        count = min(BLOCK, steps - start)
        topics = _roam(spec, draw, own_topics, topic, count)
        rank, common, lag = _candidates(spec, draw, zipf, lags, count)
        fresh = np.where(common, rank, by_topic[topics[:, :, None, None], rank])
        lag = lag.reshape(count, -1)
        lag[lag > np.arange(start, start + count)[:, None]] = 0  # nothing to repeat yet
        for step in range(count):
            now = start + step
            new = fresh[step].reshape(lanes * layers, 2 * k)
            concepts[now] = new[:, :k].ravel()
            # a lag of 0 reads this very row: the fresh draw
            held = concepts[now - lag[step], np.arange(lag.shape[1])].reshape(-1, k)
            concepts[now] = _distinct(held, new[:, k:], seen).ravel()
    rows = concepts.reshape(steps, lanes, layers, k).swapaxes(0, 1).reshape(-1, layers, k)
    experts = to_expert[np.arange(layers)[:, None], rows]
    return _trace(spec, experts, draw, "zipf-topics-recency 2")


def _candidates(spec, draw, zipf, lags, count):
    """Zipf ranks and whether all topics share them [count, lanes, layers, 2k] (second half: spares), and lags [.., k].

    A slot that follows the layer before takes all three from it.
    """
    shape = (count, spec.sequences, spec.layers, 2 * spec.top_k)
    layer = np.arange(spec.layers)[:, None]
    place = draw.u16(shape) >> 2
    common = draw.u16(shape) >= spec.topic_share * UNIT
    lag = lags[draw.u16((*shape[:3], spec.top_k))]
    follows = draw.u16(shape) < spec.layer_link * UNIT
    origin = np.maximum.accumulate(np.where(follows, 0, layer), axis=2)
    pick = np.take_along_axis
    rank = zipf[layer, pick(place, origin, 2)]  # what is followed is the draw: each layer reads it by its own law
    return rank, pick(common, origin, 2), pick(lag, origin[..., : spec.top_k], 2)


def _distinct(held: np.ndarray, spares: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Replace what a row holds twice by its first unused spares, else by the lowest unused concepts; [rows, k]."""
    k = held.shape[1]
    row = np.arange(len(held))[:, None]
    cell = row * seen.shape[1] + np.concatenate([held, spares], axis=1)
    slot = np.broadcast_to(np.arange(2 * k, dtype=seen.dtype), cell.shape)
    seen.reshape(-1)[cell[:, ::-1].ravel()] = slot[:, ::-1].ravel()  # the first holder is written last and stays
    first = seen.reshape(-1)[cell] == slot
    twice, usable = ~first[:, :k], first[:, k:]
    ordered = np.take_along_axis(spares, (~usable).argsort(axis=1, kind="stable"), axis=1)
    nth = twice.cumsum(axis=1) - 1
    out = np.where(twice, ordered[row, nth], held)
    for at in np.flatnonzero(twice.sum(axis=1) > usable.sum(axis=1)).tolist():
        used = set(held[at].tolist())
        unused = (c for c in range(seen.shape[1]) if c not in used)
        out[at, twice[at]] = [next(unused) for _ in range(int(twice[at].sum()))]
    return out


def _roam(spec, draw, own_topics, topic, count):
    """Topic of each sequence at each step, int64 [count, lanes]; ``topic`` carries over to the next block."""
    switch = draw.u16((count, len(topic))) < spec.topic_rate * UNIT
    pick = draw.below(spec.topics_per_sequence, switch.shape)
    path = np.empty(switch.shape, np.int64)
    for step in range(count):
        topic[:] = np.where(switch[step], own_topics[np.arange(len(topic)), pick[step]], topic)
        path[step] = topic
    return path


def _zipf_tables(spec, draw):
    """Inverse of each layer's law on a grid, int16 [layers, DRAWS]: rank r has a share as (r + shift * E)^-skew."""
    # evenly spread, in random order: a mean over few layers should not hang on the seed
    place = (2.0 * draw.permutations(1, spec.layers)[0] + 1.0) / spec.layers - 1.0
    exponent = spec.skew * (1.0 + spec.skew_spread * place)
    share = (np.arange(1, spec.drawn + 1) + spec.shift * spec.experts)[None, :] ** -exponent[:, None]
    edges = np.rint(share.cumsum(axis=1) / share.sum(axis=1, keepdims=True) * DRAWS)
    return np.stack([np.searchsorted(edge, np.arange(DRAWS), side="right") for edge in edges]).astype(np.int16)


def _lag_table(spec):
    """Lag by 16-bit draw, int64 [UNIT]: 0 (draw anew) with probability 1 - persistence, else d with weight 1/d."""
    weight = 1.0 / np.arange(1, spec.memory + 1)
    edges = np.rint(spec.persistence * UNIT * weight.cumsum() / weight.sum())
    lag = np.searchsorted(edges, np.arange(UNIT), side="right") + 1
    return np.where(lag <= spec.memory, lag, 0)


def _trace(spec, experts, draw, generator):
    """Attach weights, rows and metadata."""
    steps = spec.prefill + spec.decode
    gaps = draw.below(UNIT, experts.shape) + 1
    weights = gaps[..., ::-1].cumsum(axis=-1)[..., ::-1].astype(np.float64)  # strictly descending
    weights /= weights.sum(axis=-1, keepdims=True)
    position = np.tile(np.arange(steps, dtype=np.int32), spec.sequences)
    metadata = {
        "model": f"synthetic {spec.layers}x{spec.experts} top-{spec.top_k}",
        "experts": spec.experts,
        "top_k": spec.top_k,
        "native_top_k": spec.top_k,
        "source": "moebench.trace.synthetic",
        "licence": "none needed: generated",
        "seed": spec.seed,
        "generator": generator,
        "parameters": asdict(spec),
        "gaps": [],
    }
    laws = [field for field in fields(spec) if field.name not in SIZES]
    if generator.startswith("zipf") and all(getattr(spec, law.name) == law.default for law in laws):
        metadata["fitted_to"], metadata["sources"] = list(FITTED_TO), list(FITTED_TO.values())
    return Trace(
        experts=np.ascontiguousarray(experts, dtype=np.int16),
        weights=np.ascontiguousarray(weights, dtype=np.float16),
        phase=np.where(position < spec.prefill, PREFILL, DECODE).astype(np.int8),
        sequence=np.repeat(np.arange(spec.sequences, dtype=np.int32), steps),
        position=position,
        metadata=metadata,
    )
