"""Correction and metrics of one ragged batch: ours against verl, the same modes side by side.

    python benchmarks/correction.py [--sequences 512] [--longest 8192] [--threads N] [--json PATH] [--alone]

Modes: token importance weights truncated at 2; sequences rejected by mean k3; tokens rejected by k1.
Bar on a CPU: at least 20 times faster than verl's `compute_rollout_correction_and_rejection_mask`,
and at most 4 times the time of merely reading the packed inputs; compiled, at most 8 ns a token for one mode.
Where verl is not installed, or with --alone, ours is timed alone. With one thread the seconds are those that the
process kept a core busy, so that a busy machine costs only what it evicts from caches.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import interleaved_medians, machine
from torch import Tensor

from offdrift.compiled import compiled_passes
from offdrift.compiled.build import library
from offdrift.correction import Corrected, Correction, Gate, Weight
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats.drift import DriftStats
from offdrift.stats.metrics import summarize

CAP, K3_HIGH, RATIO_HIGH = 2.0, 0.01, 2.0
TOKEN_WEIGHT = Weight(on="mismatch", unit="token", cap=CAP)
SEQ_MEAN_K3 = Gate(statistic="k3", on="mismatch", unit="seq_mean", high=K3_HIGH)
TOKEN_K1 = Gate(statistic="ratio", on="mismatch", unit="token", low=1 / RATIO_HIGH, high=RATIO_HIGH)

MODES: dict[str, tuple[Correction, dict[str, str]]] = {
    "token weight": (Correction(weights=(TOKEN_WEIGHT,)), {}),
    "token weight, seq_mean_k3": (
        Correction((SEQ_MEAN_K3,), (TOKEN_WEIGHT,)),
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": f"{K3_HIGH}"},
    ),
    "token weight, seq_mean_k3, token_k1": (
        Correction((SEQ_MEAN_K3, TOKEN_K1), (TOKEN_WEIGHT,)),
        {"rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": f"{K3_HIGH},{1 / RATIO_HIGH}_{RATIO_HIGH}"},
    ),
}


@dataclass(frozen=True)
class Batch:
    """The same tokens twice: packed, as ours are, and padded, as verl's are."""

    segments: Segments
    rollout: Tensor
    old: Tensor
    padded_rollout: Tensor
    padded_old: Tensor
    mask: Tensor


def ragged(sequences: int, longest: int) -> Batch:
    """Log-normal lengths (about a fifth of the padded area), log-ratios with a heavy tail."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(sequences).log_normal_(0.0, 0.9, generator=generator) * longest / 8
    lengths = lengths.round().long().clamp(1, longest)
    lengths[0] = longest
    segments = Segments.from_lengths(lengths)
    n = segments.num_tokens
    rollout = -torch.empty(n).exponential_(2.0, generator=generator)
    noise = 0.05 * torch.randn(n, generator=generator)
    wide = 1 + 8 * (torch.rand(n, generator=generator) < 0.01)
    worse = 1 + 2 * segments.spread(torch.rand(sequences, generator=generator)).square()
    old = (rollout + noise * wide * worse).clamp(max=0.0)
    mask = torch.arange(longest) < lengths[:, None]
    padded = [torch.zeros(sequences, longest).masked_scatter_(mask, x) for x in (rollout, old)]
    return Batch(segments, rollout, old, *padded, mask.long())


def ours_packed(batch: Batch, correction: Correction) -> tuple[Corrected, dict[str, float]]:
    # A fresh Segments: nothing that an earlier call derived and cached is free here.
    segments = Segments(batch.segments.cu_seqlens)
    return _ours(LogProbs.pack(batch.rollout, logp_old=batch.old, segments=segments), correction)


def ours_compiled(batch: Batch, correction: Correction) -> tuple[Corrected, dict[str, float]]:
    with compiled_passes():
        return ours_packed(batch, correction)


def ours_padded(batch: Batch, correction: Correction) -> tuple[Tensor, Tensor, dict[str, float]]:
    logprobs = LogProbs.pack(batch.padded_rollout, logp_old=batch.padded_old, mask=batch.mask)
    corrected, metrics = _ours(logprobs, correction)
    return logprobs.unpack(corrected.keep), logprobs.unpack(corrected.weight), metrics


def _ours(logprobs: LogProbs, correction: Correction) -> tuple[Corrected, dict[str, float]]:
    corrected = correction(logprobs)
    return corrected, summarize(DriftStats.of(logprobs, corrected))


def read(batch: Batch) -> float:
    """Merely reading the packed inputs: one reduction over each, one number to the host."""
    return float(torch.stack([batch.rollout.sum(), batch.old.sum()]).sum())


def verl_function() -> Callable[..., tuple] | None:
    """verl's correction, or None where verl cannot be imported."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    except ImportError:
        return None
    return helper.compute_rollout_correction_and_rejection_mask


def run_verl(verl: Callable[..., tuple], batch: Batch, options: dict[str, str]) -> tuple:
    return verl(
        batch.padded_old, batch.padded_rollout, batch.mask,
        rollout_is="token", rollout_is_threshold=CAP, **options,
    )  # fmt: skip


def disagreements(verl: Callable[..., tuple], batch: Batch, mode: str) -> dict[str, float]:
    """Tokens on which the two keep differently, and the largest difference of a weight."""
    correction, options = MODES[mode]
    proto, mask, _ = run_verl(verl, batch, options)
    keep, weight, _ = ours_padded(batch, correction)
    theirs = proto.batch["rollout_is_weights"] * batch.mask
    return {
        "tokens_kept": int(keep.sum()),
        "tokens_kept_differently": int((keep.bool() != mask.bool()).sum()),
        "largest_weight_difference": float((weight - theirs).abs().max()),
    }


def compare(batch: Batch, mode: str, verl: Callable[..., tuple] | None, repeats: int) -> dict:
    correction, options = MODES[mode]
    arms: dict[str, Callable[[], object]] = {
        "read": lambda: read(batch),
        "ours, packed": lambda: ours_packed(batch, correction),
        "ours, padded": lambda: ours_padded(batch, correction),
    }
    with compiled_passes():
        if library("passes") is not None:
            arms["ours, compiled"] = lambda: ours_compiled(batch, correction)
    found: dict[str, object] = {}
    if verl is not None:
        arms["verl"] = lambda: run_verl(verl, batch, options)
        found = {"agreement": disagreements(verl, batch, mode)}
    for run in arms.values():
        run()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = interleaved_medians(arms, repeats=repeats, clock=clock)
    per_token = {name: 1e9 * s / batch.segments.num_tokens for name, s in seconds.items()}
    return {"seconds": seconds, "ns_per_token": per_token, **found}


def show(mode: str, found: dict) -> None:
    seconds = found["seconds"]
    print(f"\n{mode}\n{'':14}{'ms':>9}{'ns/token':>10}{'x read':>9}{'verl / it':>11}")
    for name, s in seconds.items():
        faster = f"{seconds['verl'] / s:11.1f}" if "verl" in seconds else f"{'-':>11}"
        print(f"{name:14}{1e3 * s:9.2f}{found['ns_per_token'][name]:10.2f}{s / seconds['read']:9.1f}{faster}")
    if "agreement" in found:
        print("agreement: " + ", ".join(f"{k} {v:g}" for k, v in found["agreement"].items()))


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="leave verl out")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    batch, verl, facts = ragged(args.sequences, args.longest), None if args.alone else verl_function(), machine("verl")
    filled = batch.segments.num_tokens / batch.mask.numel()
    print(
        f"{args.sequences} sequences, {batch.segments.num_tokens:,} tokens, padded to {args.longest} ({filled:.0%} filled)\n{facts}"
    )
    if verl is None:
        print("verl is left out or cannot be imported here: ours is timed alone, there is no ratio")
    found: dict[str, object] = {
        "machine": facts,
        "load_average": list(os.getloadavg()),
        "tokens": batch.segments.num_tokens,
    }
    for mode in MODES:
        found[mode] = result = compare(batch, mode, verl, args.repeats)
        show(mode, result)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
