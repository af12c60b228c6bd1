"""Write a log in the format of a framework, with the fields that the framework logs and no others."""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.field.scene import Batch, Log

Row = dict[str, Any]
Writer = Callable[[Log, Path], None]


@dataclass(frozen=True)
class Format:
    """A format: the fields that it has, in this benchmark's words, and what writes it."""

    fields: frozenset[str]
    write: Writer
    source: str


def floats(x: np.ndarray) -> list[float]:
    """Float32 values as Python floats; NaN stays."""
    return [float(np.float32(v)) for v in x]


def rows(log: Log) -> Iterator[tuple[Batch, int, Row]]:
    """Each response: its batch, its number, and its values without padding; log-probs are float32."""
    for batch in log.batches:
        for i, n in enumerate(batch.lengths):
            n = int(n)
            yield (
                batch,
                i,
                {
                    "prompt": batch.prompts[i],
                    "tokens": [int(t) for t in batch.tokens[i, :n]],
                    "mask": [int(m) for m in batch.mask[i, :n]],
                    "mu": floats(batch.mu[i, :n]),
                    "old": floats(batch.old[i, :n]),
                    "current": floats(batch.current[i, :n]),
                    "entropy": floats(batch.entropy[i, :n]),
                    "rollout_version": [int(v) for v in batch.rollout_version[i, :n]],
                    "turn": [int(t) for t in batch.turn[i, :n]],
                    "advantage": float(batch.advantage[i]),
                    "reward": float(batch.reward[i]),
                    "group": int(batch.group[i]),
                    "version": int(batch.version[i]),
                    "truncated": int(batch.truncated[i]),
                    "worker": f"worker-{batch.worker[i]}",
                    "updates_before": int(batch.updates_before[i]),
                    "index": batch.step * len(batch.prompts) + i,
                },
            )


def by_step(log: Log) -> Iterator[tuple[int, list[Row]]]:
    """Responses of each step."""
    for batch in log.batches:
        yield batch.step, [row for _, _, row in rows(Log([batch], log.vocab, log.temperature, log.versions))]


def lines(path: Path, values: list[Row]) -> None:
    """Write JSON lines, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(v) + "\n" for v in values))


def spoken(tokens: list[int]) -> str:
    """A text of as many words as tokens."""
    return " ".join(f"w{t}" for t in tokens)


def plain_jsonl(log: Log, folder: Path) -> None:
    """Write the plain schema as JSON lines: engine, old policy, versions, workers; no current policy."""
    out = []
    for batch, _, r in rows(log):
        row: Row = {
            "step": batch.step, "logp_rollout": r["mu"], "logp_old": r["old"], "tokens": r["tokens"],
            "mask": r["mask"], "advantages": r["advantage"], "reward": r["reward"], "group_id": r["group"],
            "truncated": r["truncated"], "worker": r["worker"], "turn_ids": r["turn"],
        }  # fmt: skip
        if log.versions:
            row |= {"version": r["version"], "rollout_version": r["rollout_version"]}
        out.append(row)
    lines(folder / "log.jsonl", out)


def parquet(path: Path, values: list[Row]) -> None:
    """Write rows as Parquet; lists of floats as float32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in values[0]:
        column = [v[name] for v in values]
        first = next((x for c in column for x in (c if isinstance(c, list) else [c])), None)
        narrow = isinstance(first, float)
        if isinstance(column[0], list):
            columns[name] = pa.array(column, pa.list_(pa.float32() if narrow else pa.int32()))
        else:
            columns[name] = pa.array(column, pa.float32() if narrow else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def plain_parquet(log: Log, folder: Path) -> None:
    """Write the plain schema as Parquet, a file per step, with the current policy and its updates."""
    for step, found in by_step(log):
        out = []
        for r in found:
            row: Row = {
                "step": step, "logp_rollout": r["mu"], "logp_old": r["old"], "logp": r["current"],
                "tokens": r["tokens"], "mask": r["mask"], "advantages": r["advantage"], "reward": r["reward"],
                "group_id": r["group"], "truncated": r["truncated"], "worker": r["worker"],
                "turn_ids": r["turn"], "entropy": r["entropy"], "updates_before": r["updates_before"],
            }  # fmt: skip
            if log.versions:
                row |= {"version": r["version"], "rollout_version": r["rollout_version"]}
            out.append(row)
        parquet(folder / f"step_{step:05d}.parquet", out)


def trained_only(r: Row, *names: str) -> Row:
    """Values at places that train, with their places: what recorders of losses keep."""
    keep = [j for j, m in enumerate(r["mask"]) if m]
    return {**{n: [r[n][j] for j in keep] for n in names}, "position": keep}


def recorder(*policies: str, extra: tuple[str, ...] = (), per_row: tuple[str, ...] = ()) -> Writer:
    """Write what a recorder inside a framework's loss or driver is given."""
    names = {"mu": "logp_rollout", "old": "logp_old", "current": "logp"}

    def write(log: Log, folder: Path) -> None:
        for step, found in by_step(log):
            out = []
            for r in found:
                kept = trained_only(r, *policies, *extra)
                row: Row = {"step": step + 1, **{names.get(n, n): v for n, v in kept.items()}}
                row["advantages"] = r["advantage"]
                for name in per_row:
                    row[{"group": "group_id"}.get(name, name)] = r[name]
                if not log.versions:
                    row.pop("rollout_version", None)
                out.append(row)
            parquet(folder / f"log-{step:06d}-{step:06d}-rank0-0.parquet", out)

    return write


def verl_dump(log: Log, folder: Path) -> None:
    """Write verl's `trainer.rollout_data_dir`: texts and scores."""
    for step, found in by_step(log):
        lines(
            folder / f"{step + 1}.jsonl",
            [
                {
                    "input": spoken(r["prompt"]), "output": spoken(r["tokens"]), "gts": "42", "score": r["reward"],
                    "step": step + 1, "request_id": f"r{r['index']}",
                }
                for r in found
            ],
        )  # fmt: skip


def trl(log: Log, folder: Path) -> None:
    """Write TRL's completions, with log-probs and tokens that a reward function added by `log_extra`."""
    for step, found in by_step(log):
        out = []
        for r in found:
            kept = trained_only(r, "mu", "old", "tokens")
            out.append(
                {
                    "step": step + 1, "prompt": spoken(r["prompt"]), "completion": spoken(r["tokens"]),
                    "even": r["reward"], "logp_rollout": kept["mu"], "logp_old": kept["old"],
                    "tokens": kept["tokens"], "advantage": r["advantage"],
                }
            )  # fmt: skip
        parquet(folder / "completions" / f"completions_{step + 1:05d}.parquet", out)


def finite(values: list[float]) -> list[float | None]:
    """Null where a value is not finite."""
    return [v if np.isfinite(v) else None for v in values]


def prime_rl(log: Log, folder: Path) -> None:
    """Write prime-rl's token exports: prompt and response, engine and trainer, no versions; null where not finite."""
    for step, found in by_step(log):
        out = []
        for k, r in enumerate(found):
            p = len(r["prompt"])
            n = p + len(r["tokens"])
            zeros = [0.0] * p
            with np.errstate(over="ignore", invalid="ignore"):
                d = np.array(r["current"]) - np.array(r["mu"])
                ratio = np.exp(d)
                out.append(
                    {
                        "schema_version": 1, "step": step, "rank": 0, "micro_step": k // 8, "micro_sequence_idx": k % 8,
                        "export_sequence_idx": k, "env_name": "toy", "token_ids": r["prompt"] + r["tokens"],
                        "position_ids": list(range(n)), "loss_mask": [False] * p + [bool(m) for m in r["mask"]],
                        "advantages": zeros + [r["advantage"]] * len(r["tokens"]),
                        "inference_logprobs": zeros + finite(r["mu"]), "trainer_logprobs": [-9.0] * p + finite(r["current"]),
                        "entropy": [0.5] * p + r["entropy"], "mismatch_kl": zeros + finite(list(np.expm1(d) - d)),
                        "log_importance_ratio": zeros + finite(list(d)), "importance_ratio": [1.0] * p + finite(list(ratio)),
                        "prob_delta": zeros + finite(list(np.exp(r["current"]) - np.exp(r["mu"]))),
                        "is_masked": [None] * n, "is_masked_high": [None] * n, "is_masked_low": [None] * n,
                        "rl_weights": [None] * n, "ce_weights": [None] * n, "ref_kl_weights": [None] * n,
                    }
                )  # fmt: skip
        out = [v for v in out if any(v["loss_mask"])]
        lines(folder / "token_exports" / f"step_{step}" / "rank_0.jsonl", out)
        (folder / "token_exports" / f"step_{step}" / "STABLE").touch()


def nemo_rl(log: Log, folder: Path) -> None:
    """Write NeMo-RL's training data: every value in a list of one, padded, NaN as Python writes it."""
    for step, found in by_step(log):
        width = max(len(r["prompt"]) + len(r["tokens"]) for r in found)
        out = []
        for k, r in enumerate(found):
            p, n = len(r["prompt"]), len(r["prompt"]) + len(r["tokens"])
            pad = width - n
            out.append(
                {
                    "content": [[spoken(r["prompt"]), spoken(r["tokens"])]], "rewards": [r["reward"]],
                    "input_lengths": [n], "token_ids": [r["prompt"] + r["tokens"] + [0] * pad],
                    "token_loss_mask": [[0] * p + r["mask"] + [0] * pad], "sample_loss_mask": [1.0],
                    "advantages": [[r["advantage"]] * width],
                    "generation_logprobs": [[0.0] * p + r["mu"] + [0.0] * pad],
                    "prev_logprobs": [[0.0] + [-8.0] * (p - 1) + r["old"] + [-8.0] * pad], "idx": k,
                }
            )  # fmt: skip
        lines(folder / f"train_data_step{step + 1}.jsonl", out)


def slime(log: Log, folder: Path) -> None:
    """Write slime's train dumps (`--save-debug-train-data`)."""
    import torch

    (folder / "train").mkdir(parents=True, exist_ok=True)
    for step, found in by_step(log):
        samples = [
            {
                "data_parallel_rank": i % 2, "sample_index": i, "rollout_position": i,
                "tokens": torch.tensor(r["prompt"] + r["tokens"]), "response_lengths": len(r["tokens"]),
                "total_lengths": len(r["prompt"]) + len(r["tokens"]),
                "loss_masks": torch.tensor(r["mask"], dtype=torch.int32), "rewards": r["advantage"],
                "rollout_log_probs": torch.tensor(r["mu"]), "log_probs": torch.tensor(r["old"]),
                "advantages": torch.full((len(r["tokens"]),), r["advantage"]),
                "returns": torch.full((len(r["tokens"]),), r["advantage"]),
            }
            for i, r in enumerate(found)
        ]  # fmt: skip
        shards = [
            {"rank": k, "data_parallel_rank": k, "sample_indices": list(range(k, len(samples), 2)),
             "partition": list(range(k, len(samples), 2)), "num_microbatches": [1]}
            for k in range(2)
        ]  # fmt: skip
        payload = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": samples, "dp_shards": shards,
                   "raw_reward": [r["reward"] for r in found]}  # fmt: skip
        torch.save(payload, folder / "train" / f"{step}.pt")


def miles(log: Log, folder: Path) -> None:
    """Write miles' train dumps of two data-parallel ranks (`--dump-details`)."""
    import torch

    (folder / "train_data").mkdir(parents=True, exist_ok=True)
    for step, found in by_step(log):
        for rank in range(2):
            mine = list(range(rank, len(found), 2))
            some = [found[i] for i in mine]
            lengths = [len(r["tokens"]) for r in some]
            data = {
                "tokens": [torch.tensor(r["prompt"] + r["tokens"]) for r in some], "response_lengths": lengths,
                "total_lengths": [len(r["prompt"]) + len(r["tokens"]) for r in some],
                "loss_masks": [torch.tensor(r["mask"], dtype=torch.int32) for r in some],
                "rewards": [r["advantage"] for r in some], "sample_indices": mine, "partition": mine,
                "raw_reward": [r["reward"] for r in found], "num_microbatches": [1],
                "rollout_log_probs": [torch.tensor(r["mu"]) for r in some],
                "log_probs": [torch.tensor(r["old"]) for r in some],
                "advantages": [torch.full((n,), r["advantage"]) for r, n in zip(some, lengths, strict=True)],
                "returns": [torch.full((n,), r["advantage"]) for r, n in zip(some, lengths, strict=True)],
            }  # fmt: skip
            payload = {
                "rollout_id": step,
                "rank": rank,
                "rollout_data": data,
                "cp_rank": 0,
                "cp_size": 1,
                "qkv_format": "thd",
            }
            torch.save(payload, folder / "train_data" / f"{step}_{rank}.pt")


class Named:
    """An object that a pickle asks for under a name of a package which is not here."""

    def __init__(self, arguments: tuple[Any, ...], function: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


SKYRL_MODULE = "skyrl.backends.skyrl_train.training_batch"


def skyrl(log: Log, folder: Path) -> None:
    """Write SkyRL's dumped training input (`trainer.dump_data_batch`): right-aligned responses, the batch filled up."""
    module = types.ModuleType(SKYRL_MODULE)

    def _rebuild_tensor_batch(cls: type, state: dict[str, Any]) -> None: ...

    class TrainingInputBatch: ...

    for thing in (_rebuild_tensor_batch, TrainingInputBatch):
        thing.__module__, thing.__qualname__ = SKYRL_MODULE, thing.__name__
        setattr(module, thing.__name__, thing)
    names = [SKYRL_MODULE.rsplit(".", k)[0] for k in range(3, 0, -1)]
    shadow = {n: types.ModuleType(n) for n in names} | {SKYRL_MODULE: module}
    before = {n: sys.modules.get(n) for n in shadow}
    sys.modules.update(shadow)
    try:
        (folder / "dumped_data").mkdir(parents=True, exist_ok=True)
        for step, found in by_step(log):
            state = skyrl_state(found)
            path = folder / "dumped_data" / f"global_step_{step + 1}_training_input.pkl"
            path.write_bytes(pickle.dumps(Named((TrainingInputBatch, state), _rebuild_tensor_batch), protocol=4))
    finally:
        for name, was in before.items():
            if was is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = was


def skyrl_state(found: list[Row]) -> dict[str, Any]:
    """The state of a training batch, with one filling row at its end."""
    import torch

    found = [*found, found[0]]
    n = len(found)
    longest = max(len(r["tokens"]) for r in found)
    whole = max(len(r["prompt"]) for r in found) + longest
    arrays = {
        "sequences": np.zeros((n, whole), np.int64), "attention_mask": np.zeros((n, whole), np.int64),
        "response_mask": np.zeros((n, longest), np.int64), "loss_mask": np.zeros((n, longest), np.float32),
        "rollout_logprobs": np.zeros((n, longest), np.float32), "action_log_probs": np.zeros((n, longest), np.float32),
        "advantages": np.zeros((n, longest), np.float32),
    }  # fmt: skip
    for i, r in enumerate(found):
        k, both = len(r["tokens"]), r["prompt"] + r["tokens"]
        arrays["sequences"][i, -len(both) :] = both
        arrays["attention_mask"][i, -len(both) :] = 1
        arrays["response_mask"][i, -k:] = 1
        arrays["loss_mask"][i, -k:] = r["mask"]
        arrays["rollout_logprobs"][i, -k:] = r["mu"]
        arrays["action_log_probs"][i, -k:] = r["old"]
        arrays["advantages"][i, -k:] = r["advantage"]
    batch: dict[str, Any] = {
        name: {"format": "numpy", "data": x.tobytes(), "shape": x.shape, "dtype": str(x.dtype)}
        for name, x in arrays.items()
    }
    metadata = {"response_length": longest, "pad_size": 1}
    batch |= {"values": None, "rollout_expert_indices": None}
    return {"batch_dict": batch, "batch_size": n, "device": torch.device("cpu"), "metadata": metadata}


def open_instruct(log: Log, folder: Path) -> None:
    """Write open-instruct's traces: the engine's side alone, 0 for what a tool wrote."""
    out = []
    for batch, i, r in rows(log):
        tools = bool(0 in r["mask"])
        mu = [v if m else 0.0 for v, m in zip(r["mu"], r["mask"], strict=True)]
        out.append(
            {
                "step": batch.step + 1, "sample_idx": i, "prompt_idx": r["group"], "prompt_tokens": r["prompt"],
                "response_tokens": r["tokens"], "reward": r["reward"], "advantage": r["advantage"],
                "finish_reason": "length" if r["truncated"] else "stop", "dataset": "toy", "ground_truth": "42",
                "request_info": {"tool_calleds": True} if tools else None, "logprobs": mu,
            }
        )  # fmt: skip
    lines(folder / "run_rollouts_000000.jsonl", out)


def fields(*names: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(names)


FORMATS = {
    "plain-jsonl": Format(
        fields("mu", "old", "versions", "worker", "tokens", "turns", "truncated", "groups"), plain_jsonl, "docs/logs.md"
    ),
    "plain-parquet": Format(
        fields("mu", "old", "current", "versions", "worker", "tokens", "turns", "truncated", "groups", "entropy"),
        plain_parquet, "docs/logs.md",
    ),
    "verl": Format(
        fields("mu", "old", "tokens", "groups"),
        recorder("mu", "old", extra=("tokens",), per_row=("group",)), "docs/integrations/verl.md",
    ),
    "trl": Format(fields("mu", "old", "tokens"), trl, "docs/logs.md, TRL's log_extra"),
    "prime-rl": Format(fields("mu", "current", "tokens", "groups", "entropy"), prime_rl, "prime-rl 559b447"),
    "slime": Format(fields("mu", "old", "tokens", "groups"), slime, "slime 624b824"),
    "miles": Format(fields("mu", "old", "tokens", "groups"), miles, "miles 31f1ca9"),
    "skyrl": Format(fields("mu", "old", "tokens", "groups"), skyrl, "SkyRL a956457"),
    "nemo-rl": Format(fields("mu", "old", "tokens", "groups"), nemo_rl, "NeMo-RL 7ea279a"),
    "areal": Format(
        fields("mu", "old", "current", "tokens"),
        recorder("mu", "old", "current", extra=("tokens", "rollout_version")), "docs/integrations/areal.md",
    ),
    "openrlhf": Format(
        fields("mu", "old", "current"), recorder("mu", "old", "current"), "docs/integrations/openrlhf.md"
    ),
    "roll": Format(
        fields("mu", "old", "current", "tokens"), recorder("mu", "old", "current", extra=("tokens",)),
        "docs/integrations/roll.md",
    ),
    "open-instruct": Format(fields("mu", "tokens", "groups"), open_instruct, "open-instruct e6c3044"),
    "verl-dump": Format(fields(), verl_dump, "verl 0.9.1, trainer.rollout_data_dir"),
}  # fmt: skip
"""Formats by name. The last two hold one side or none: nothing about drift can be seen there."""
