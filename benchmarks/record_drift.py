"""Record real drift for `offdrift lab length-bias`: one engine draws, another scores every token.

SmolLM2-135M-Instruct writes long answers, drawn in bfloat16 or with int8 weights and scored in
float32; for every token the log-ratio and the exact KL over the vocabulary are kept.

    python benchmarks/record_drift.py              # both, into the package (about 20 minutes)
    python benchmarks/record_drift.py --sequences 2 --tokens 8 --out /tmp/recordings
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from offdrift.divergence.fused import exact_divergences
from offdrift.engines import make_engine
from offdrift.engines.score import chunks, score
from offdrift.models import load_model
from offdrift.records import FullVocab, Rollouts, Sampling
from offdrift_lab.exact.length_bias import FOLDER, Stream, write_recording

TOPICS = (
    "the sea", "a lighthouse", "bread", "the invention of paper", "a long train journey", "winter",
    "how bridges stand", "an old clock", "volcanoes", "a village market", "the night sky", "rivers",
    "a lost letter", "sailing", "the history of maps", "a garden", "mountains", "a strange machine",
    "bees", "a desert crossing", "glass", "the first flight", "music", "a chess game", "forests",
    "a harbor town", "cooking", "the moon", "a detective", "rain", "an island", "telescopes",
)  # fmt: skip
DRIFTS = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "float32", "quantization": "int8"}}
AT_ONCE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model("smollm2-135m", seed=0)
    asks = [f"Write a very long text about {TOPICS[i % len(TOPICS)]}." for i in range(args.sequences)]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": ask}], add_generation_prompt=True, return_dict=False)
        for ask in asks
    ]
    for name, how in DRIFTS.items():
        engine = make_engine("transformers", model, evidence_limit_mib=8192, **how)
        parts = []
        for i in range(0, len(prompts), AT_ONCE):
            drawn = engine.generate(prompts[i : i + AT_ONCE], Sampling(max_tokens=args.tokens), seed=i, evidence="full")
            parts.append(compared(model, drawn, args.tokens))
            print(f"{name}: {min(i + AT_ONCE, len(prompts))} of {len(prompts)} sequences", flush=True)
        log_ratio, kl = (torch.cat(x) for x in zip(*parts, strict=True))
        stream = Stream(f"SmolLM2-135M, {name} against float32", log_ratio, kl)
        write_recording(stream, args.out / f"smollm2-{name}.npz")
        print(f"{name}: mean KL {kl.mean():.2e}, largest {kl.max():.2e} nat")


@torch.no_grad()
def compared(model: torch.nn.Module, drawn: Rollouts, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratio and exact KL of every token, `[sequences, tokens]`."""
    log_ratio, kl = torch.empty(len(drawn.tokens)), torch.empty(len(drawn.tokens))
    for piece in chunks(drawn, token_budget=tokens + 64):
        part, rows = drawn.select(piece), drawn.segments.rows(piece)
        said = score(model, part)
        assert isinstance(part.evidence, FullVocab)
        found = exact_divergences(part.evidence.logp, said.logits)
        log_ratio[rows] = said.logp - part.logp_rollout
        kl[rows] = found.kl_rollout_current
    return log_ratio.view(-1, tokens), kl.view(-1, tokens)


if __name__ == "__main__":
    main()
