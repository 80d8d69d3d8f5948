"""Train tinymoe (or its dense draft) from scratch on the five domains; resumable, CPU only.

    python -m moebench.models.tinymoe.train --out DIR [--kind moe|draft] [--steps N] [--workers N]

What makes it learn in an hour or so on two cores: items grow from short to full length over the first part of the
run, and the loss weighs the written steps and answers far above the prompt. Each worker is a process with one
compute thread, which takes its share of every batch. A batch is a pure function of (seed, step, steps), so a run that
was interrupted continues with the very data it would have seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers import AutoTokenizer

from moebench.models.tinymoe.domains import DOMAINS, Item, generate

VOCABULARY_SIZE = 384
DOMAIN_SHARES = {"chain": 0.8, "recall": 0.6, "lists": 1.2, "program": 1.6, "world": 1.2}
ITEMS_PER_STEP = 56
PROMPT_WEIGHT, STEPS_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0, 2.0
AUX_LOSS_COEF = 0.01
PEAK_LR = {"moe": 4e-3, "draft": 4e-3}
CURRICULUM_SHARE = 0.3  # of all steps, until items reach full length


def build_tokenizer(out: Path):
    """Train a byte-level BPE on the generators' own text; words become tokens, digits stay single."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    corpus = []
    for domain in DOMAINS:
        for _ in range(2000):
            item = generate(domain, rng, test=False)
            corpus.append(item.prompt + item.completion)
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    fast.save_pretrained(out)
    return fast


def build_model(kind: str, tokenizer):
    """The untrained network: a qwen3_moe of about 6.8 M parameters, or a dense qwen3 draft of about 1.1 M."""
    common = dict(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    if kind == "draft":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=6, intermediate_size=320, **common))
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=8,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=AUX_LOSS_COEF,
        **common,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def encode(items: list[Item], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, S] int64 and per-target loss weights [B, S] fp32 (zero on padding)."""
    rows, weights = [], []
    for item in items:
        prompt = tokenizer(item.prompt)["input_ids"]
        steps = tokenizer(f" {item.steps} #" if item.steps else " #")["input_ids"]
        answer = [*tokenizer(f" {item.answer}\n")["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + steps + answer)
        weights.append(
            [PROMPT_WEIGHT] * len(prompt) + [STEPS_WEIGHT] * len(steps) + [ANSWER_WEIGHT] * len(answer)
        )
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    weight = torch.zeros(len(rows), width)
    for i, (row, w) in enumerate(zip(rows, weights, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        weight[i, : len(row)] = torch.tensor(w)
    return ids, weight


def batch(seed: int, step: int, total: int) -> list[Item]:
    """The items of one step; a pure function of its arguments, so a resumed run sees the same data."""
    rng = random.Random(f"{seed}/{step}")
    reach = min(1.0, 0.2 + step / (CURRICULUM_SHARE * total))
    domains = rng.choices(list(DOMAIN_SHARES), list(DOMAIN_SHARES.values()), k=ITEMS_PER_STEP)
    level = [reach if rng.random() < 0.6 else rng.random() * reach for _ in domains]
    return [generate(d, rng, test=False, level=x) for d, x in zip(domains, level, strict=True)]


def load_balancing_loss(router_logits, mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """Switch Transformers' auxiliary loss (Fedus et al. 2021, eq. 4-6), averaged over layers, padding excluded."""
    total = 0.0
    for logits in router_logits:
        probabilities = logits[mask].float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k).indices, 1.0)
        total = total + probabilities.shape[1] * (chosen.mean(0) / top_k * probabilities.mean(0)).sum()
    return total / len(router_logits)


def loss_sum(model, ids: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted next-token loss (summed) and the auxiliary loss of one padded group."""
    mask = weight.reshape(-1) > 0
    if hasattr(model.config, "num_experts"):
        out = model.model(ids, output_router_logits=True, use_cache=False)
        aux = load_balancing_loss(out.router_logits, mask, model.config.num_experts_per_tok)
    else:
        out, aux = model.model(ids, use_cache=False), torch.zeros(())
    logits, target = model.lm_head(out.last_hidden_state[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    return (F.cross_entropy(logits, target, reduction="none") * weight[:, 1:].flatten()).sum(), aux


def split(items: list[Item], parts: int, tokenizer) -> list[list[Item]]:
    """Sort by length and cut into ``parts`` of about equal size once padded, so that no worker waits for long."""
    sizes = {id(i): len(tokenizer(i.prompt + i.completion)["input_ids"]) for i in items}
    items = sorted(items, key=lambda i: sizes[id(i)])
    if parts == 1:
        return [items]

    def padded(cut: int) -> int:
        return abs(cut * sizes[id(items[cut - 1])] - (len(items) - cut) * sizes[id(items[-1])])

    cut = min(range(1, len(items)), key=padded)
    return [items[:cut], items[cut:]]


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sum tensors over all workers in place, as one message."""
    if dist.is_initialized():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def teacher_forced_accuracy(model, tokenizer, count: int = 64) -> dict[str, float]:
    """Share of full-length test items whose completion is right at every token, teacher forced: a fast proxy."""
    scores = {}
    for domain in DOMAINS:
        rng = random.Random(f"probe/{domain}")
        ids, weight = encode([generate(domain, rng, test=True) for _ in range(count)], tokenizer)
        right = model(ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]
        scores[domain] = float((right | (weight[:, 1:] < STEPS_WEIGHT)).all(1).float().mean())
    return scores


def train(rank: int, kind: str, out: Path, steps: int, seed: int, save_every: int, workers: int) -> None:
    """One worker: train to ``steps``; the first one checkpoints into ``out/state.pt`` and writes the bf16 checkpoint."""
    torch.set_num_threads(1)
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{out.resolve()}/rendezvous", rank=rank, world_size=workers)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = build_model(kind, tokenizer)
    parameters = list(model.parameters())
    decay, plain = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.98), fused=True
    )
    first, tokens, seconds, sessions = 0, 0, 0.0, []
    state_file = out / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, tokens, seconds, sessions = state["step"], state["tokens"], state["seconds"], state["sessions"]
    sessions.append({"from_step": first, "script_sha256": script_hashes()})
    started, running = time.perf_counter(), math.nan
    for step in range(first, steps):
        warm = min(1.0, (step + 1) / 200)
        lr = PEAK_LR[kind] * warm * max(0.01, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        groups = [encode(items, tokenizer) for items in split(batch(seed, step, steps), workers, tokenizer)]
        norm = sum(float(w[:, 1:].sum()) for _, w in groups)
        total, aux = loss_sum(model, *groups[rank])
        (total / norm + AUX_LOSS_COEF * aux / workers).backward()
        figures = torch.stack([total.detach() / norm, aux.detach() / workers])
        all_reduce([*(p.grad for p in parameters), figures])
        tokens += sum(int((w > 0).sum()) for _, w in groups)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = figures[0].item()
        running = loss if math.isnan(running) else 0.98 * running + 0.02 * loss
        elapsed = seconds + time.perf_counter() - started
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps} loss {running:.4f} aux {figures[1].item():.3f} lr {lr:.1e} "
                  f"tokens {tokens} elapsed {elapsed:.0f}s", flush=True)  # fmt: skip
        if rank == 0 and ((step + 1) % save_every == 0 or step + 1 == steps):
            print("accuracy", {k: round(v, 2) for k, v in teacher_forced_accuracy(model, tokenizer).items()}, flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save({**state, "tokens": tokens, "seconds": elapsed, "sessions": sessions}, out / "state.tmp")
            (out / "state.tmp").replace(state_file)
    if rank == 0:
        model.to(torch.bfloat16).save_pretrained(out)
        facts = {"seed": seed, "steps": steps, "workers": workers, "tokens": tokens}
        write_provenance(kind, out, model, sessions, **facts, seconds=round(elapsed), loss=round(running, 4))


def script_hashes() -> dict[str, str]:
    """SHA-256 of the scripts that decide what the weights become."""
    here = Path(__file__).parent
    return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in ("train.py", "domains.py")}


def write_provenance(kind: str, out: Path, model, sessions: list[dict], **facts) -> None:
    """Record what produced the weights: scripts of each session, seed, steps, tokens, time, loss, versions."""
    record = {
        "model": "tinymoe" if kind == "moe" else "tinymoe-draft",
        "parameters": sum(p.numel() for p in model.parameters()),
        **facts,
        "sessions": sessions,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "licence": "Apache-2.0",
    }
    (out / "provenance.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Parse the command line, make the tokenizer and start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("moe", "draft"), default="moe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=20260901)
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--save-every", type=int, default=250)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    if not (args.out / "tokenizer.json").exists():  # a resumed run keeps its vocabulary, whatever the items are now
        build_tokenizer(args.out)
    job = (args.kind, args.out, args.steps, args.seed, args.save_every, args.workers)
    torch.multiprocessing.spawn(train, job, nprocs=args.workers)


if __name__ == "__main__":
    main()
