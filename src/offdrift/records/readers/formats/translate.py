"""Rows and dumps of each framework, translated to the plain schema; `table` names the functions.

JSON lines of NeMo-RL, open-instruct, TitanRL, and prime-rl's token exports and episodes; dumps of `torch.save` and
pickles: slime's and miles' debug dumps, SkyRL's training input. CSV whose cells are lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from offdrift.errors import RecordError
from offdrift.records.readers.columns import Row
from offdrift.records.readers.files import LIMIT, Bytes, NotRead, fingerprint, opened
from offdrift.records.readers.formats.table import (
    MILES_ROLLOUT,
    MILES_TRAIN,
    NEMO_RL,
    PRIME_RL,
    PRIME_RL_TRACES,
    SKYRL,
    SLIME_ROLLOUT,
    SLIME_ROLLOUT_COLUMNS,
    SLIME_TRAIN,
    SLIME_TRAIN_COLUMNS,
    Source,
)
from offdrift.records.readers.pickles import Array, Inert, TensorBatch, load_pickle, load_torch, plain, tensor_of

CUT_SHORT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""Reasons to stop that are limits."""

MOST = 1 << 26
"""Tokens that the samples of one line may have together: paths share their beginning."""

PER_SAMPLED = {name: c for name, c in PRIME_RL_TRACES.columns.items() if name not in ("tokens", "mask")}
"""Lists of a message that cover its sampled tokens."""


def prompt_id(tokens: Any) -> str:
    """Key that is equal for equal prompts."""
    return str(tokens.tolist() if hasattr(tokens, "tolist") else tokens)


def drawn_by_versions(versions: Any, length: int | None = None) -> Row:
    """The versions of the weights that drew a response: of each token where their spans are known, else the oldest
    and the newest.

    Args:
        versions: numbers or texts in the order of drawing, or spans, mappings with "version" (or "weight_version") and
            the tokens of each as "length" or as "start" and "end".
        length: tokens of the response, which known spans have to cover.

    Example:
        >>> drawn_by_versions(["3", "4"]), drawn_by_versions([{"version": 3, "length": 1}, {"version": 4, "length": 2}])
        ({'rollout_version': 3, 'newest_version': 4}, {'rollout_version': [3, 4, 4]})
    """
    if not isinstance(versions, list | tuple) or not versions:
        return {}
    spans = [v if isinstance(v, Mapping) else {"version": v} for v in versions]
    texts = [str(v.get("version", v.get("weight_version"))) for v in spans]
    if not all(t.isdigit() and len(t) < 10 for t in texts):
        return {}
    numbers = [int(t) for t in texts]
    lengths = [v["length"] if "length" in v else v.get("end", 0) - v.get("start", 0) for v in spans]
    oldest, newest = min(numbers), max(numbers)
    if oldest == newest:
        return {"rollout_version": oldest}
    known = all(isinstance(n, int) and 0 < n <= MOST for n in lengths)
    if known and length in (None, sum(lengths)) and sum(lengths) <= MOST:
        return {"rollout_version": [v for v, n in zip(numbers, lengths, strict=True) for _ in range(n)]}
    return {"rollout_version": oldest, "newest_version": newest}


def first_trained(mask: list[Any]) -> int:
    """Index of the first token that trains. The token at 0 has no context, so it never counts."""
    try:
        return mask.index(1, 1)
    except ValueError:
        return len(mask)


def response_of(row: Mapping[str, Any], columns: Mapping[str, str], end: int | None = None) -> dict[str, Any]:
    """Fields of the response, of a row whose lists cover the prompt as well.

    The response begins with the first token that trains, and ends before `end`. Its group is its prompt.
    """
    begin = first_trained(row[columns["mask"]][:end])
    values = {name: row.get(column) for name, column in columns.items()}
    response = {name: x[begin:end] if isinstance(x, list) else x for name, x in values.items()}
    if values["tokens"] is not None:
        response["group_id"] = prompt_id(values["tokens"][:begin])
    return response


def nemo_rl(row: Mapping[str, Any]) -> Row:
    """A row of NeMo-RL's training data, `train_data_step{N}.jsonl`, from the first token that trains on.

    Every value is wrapped in a list of one; token lists cover prompt, response and padding up to `input_lengths`; index
    0 of the log-probs belongs to no token. With dynamic sampling, `filtered_rewards` are those of the rows; `rewards`
    are those of every sequence that was drawn.

    Source: NeMo-RL 7ea279a, nemo_rl/algorithms/grpo.py and nemo_rl/utils/logger.py.
    """
    value: dict[str, Any] = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in row.items()}
    # Some algorithms log one advantage per sequence.
    response = response_of(value, NEMO_RL.columns, int(value["input_lengths"]))
    if value.get("sample_loss_mask") == 0:
        response["mask"] = [0] * len(response["mask"])
    response["reward"] = value.get("filtered_rewards", value.get("rewards"))
    response["completion"] = content = value.get("content")
    if isinstance(content, list) and content:
        # The last message is the response.
        response["prompt"], response["completion"] = "\n".join(map(str, content[:-1])), content[-1]
    return response


def open_instruct(row: Mapping[str, Any], translated: Row) -> Row:
    """A row of open-instruct's rollout traces, masked where nothing was sampled.

    Tokens of a tool have log-probs of exactly 0, where one was called; their mask is not logged. A sampled token that
    is certain is left out with them; a response without a tool keeps its zeros. To a response that stopped before its
    first token open-instruct appends the end of the text, with NaN for its log-prob: it is no hole in the log.

    Source: open-instruct e6c3044, open_instruct/rl_utils.py, vllm_utils.py and data_loader.py.
    """
    info, logp = row.get("request_info"), translated.get("logp_rollout")
    called = isinstance(info, Mapping) and bool(info.get("tool_calleds"))
    if not isinstance(logp, list) or not logp or translated.get("mask") is not None:
        return translated
    appended = row.get("finish_reason") == "stop" and (logp[-1] is None or logp[-1] != logp[-1])
    if not called and not appended:
        return translated
    mask = [int(not called or x != 0) for x in logp]
    return {**translated, "mask": [*mask[:-1], 0] if appended else mask}


def prime_rl(row: Mapping[str, Any]) -> Row:
    """The response of one of prime-rl's token exports (`trainer.enable_token_export = true`, until August 2026).

    Prompt and response together; `trainer_logprobs[i]` and `inference_logprobs[i]` are both the log-prob of token i.
    Non-finite numbers were written as null.

    Source: prime-rl 559b447, src/prime_rl/trainer/rl/token_export.py.
    """
    return response_of(row, PRIME_RL.columns)


def prime_rl_episode(record: Mapping[str, Any]) -> list[Row]:
    """A row for each training sample of one of prime-rl's episodes (`rollouts/step_N/train/effective/traces.jsonl`).

    A trace, one per agent, is a tree of messages, each with the tokens that it adds. Every path from the root to a leaf
    is one training sample, in which a message that an earlier path has trained on is context. Log-probs (the engine's;
    the trainer's where its annotations were folded in) and advantages cover the sampled tokens of a message.

    Since September 2026 one stream holds the episodes of all steps, evaluations among them, which are no rows.

    Source: prime-rl 559b447, src/prime_rl/monitors/file.py and src/prime_rl/orchestrator/trajectories.py; of September
    2026, src/prime_rl/monitors/file/; verifiers a60a606, verifiers/v1/episode.py, trace.py and graph.py.
    """
    about: dict[str, Any] = {}
    run = record.get("run") or {}
    work = run.get("work") or {}
    if "eval" in (run.get("type"), work.get("type")):
        return []
    policy = work.get("policy")
    if policy:
        about |= drawn_by_versions([policy["start"], policy["end"]])
    group = (record.get("group") or {}).get("id")
    rows: list[Row] = []
    left = MOST
    for trace in record["traces"]:
        if not trace["agent"].get("trainable", True):
            continue
        rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
        about["reward"] = sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else None
        calls = [c for c in trace.get("calls") or () if c.get("error") is None]
        at_limit = bool(calls) and calls[-1].get("finish_reason") == "length"
        about["truncated"] = int(at_limit or trace.get("stop_condition") in CUT_SHORT)
        for row in _samples(trace["nodes"]):
            left -= len(row["tokens"])
            if left < 0:
                raise ValueError(f"the paths of its traces hold more than {MOST} tokens")
            rows.append({**row, **about, "group_id": group or row["group_id"]})
    return rows


def titan_rl(record: Mapping[str, Any]) -> list[Row]:
    """A row for each training sample of one of TitanRL's rollouts (`rollout_samples.jsonl`); none for a validation.

    Turns whose prompt goes on where the turn before ended are one sample, as in its training: what comes between their
    completions is context. The step is the newest version of the weights that drew any of them.

    Source: torchtitan b5bcd76, torchtitan/experiments/rl/rollout_recorder.py; components/training_sample_builder.py.
    """
    if record["is_validation"]:
        return []
    about: Row = {name: record.get(key) for name, key in (("reward", "reward"), ("advantages", "advantage"))}
    about |= {"group_id": str(record["group_id"]), "truncated": int(str(record["status"]).startswith("truncated"))}
    samples: list[list[Mapping[str, Any]]] = []
    so_far: list[int] | None = None
    left = MOST
    for turn in record["turns"]:
        prompt, completion = turn.get("prompt_token_ids"), turn.get("completion_token_ids")
        if completion is not None and not completion:
            continue  # its prompt was too long
        left -= len(prompt or ()) + len(completion or ())
        if left < 0:
            raise ValueError(f"its turns hold more than {MOST} tokens")
        if so_far is not None and prompt is not None and prompt[: len(so_far)] == so_far:
            samples[-1].append(turn)
        else:
            samples.append([turn])
        so_far = None if prompt is None or completion is None else [*prompt, *completion]
    return [{**_packed(turns), **about} for turns in samples]


def _packed(turns: Sequence[Mapping[str, Any]]) -> Row:
    """The response of one of TitanRL's samples, from its first sampled token; without tokens, of its one turn."""
    bounds = [x for turn in turns for x in (turn.get("min_policy_version"), turn.get("max_policy_version"))]
    versions = [x for x in bounds if x is not None]
    row: Row = {**drawn_by_versions(sorted(versions)), "step": max(versions, default=None)}
    last = turns[-1]
    text = last.get("completion_message")
    if isinstance(text, Mapping) and isinstance(text.get("content"), str):
        row["completion"] = text["content"]
    if last.get("completion_token_ids") is None:
        return {**row, "logp_rollout": last["completion_logprobs"]} if last.get("completion_logprobs") else row
    begin = len(turns[0]["prompt_token_ids"])
    mask: list[int] = []
    logp: list[float | None] = []
    for turn in turns:
        between, sampled = len(turn["prompt_token_ids"]) - begin - len(mask), len(turn["completion_token_ids"])
        mask += [0] * between + [1] * sampled
        logp += [None] * between + list(turn.get("completion_logprobs") or [None] * sampled)
    tokens = [*last["prompt_token_ids"][begin:], *last["completion_token_ids"]]
    scored = any(x is not None for x in logp)
    return {**row, "tokens": tokens, "mask": mask, **({"logp_rollout": logp} if scored else {})}


def path_to(leaf: int, parents: Sequence[int | None]) -> list[int]:
    """Places of the messages from the root of a trace to a leaf."""
    path = [leaf]
    while (above := parents[path[-1]]) is not None:
        path.append(above)
    return path[::-1]


def _samples(nodes: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The training samples of a trace: its paths, each from the first token that trains."""
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and not 0 <= p < i for i, p in enumerate(parents)):
        raise ValueError("a message comes before the one that it answers")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path = path_to(leaf, parents)
        values: dict[str, list[Any]] = {"tokens": [], "mask": [], **{name: [] for name in PER_SAMPLED}}
        for i in path:
            mask = [bool(m) for m in nodes[i]["mask"]]
            values["tokens"] += nodes[i]["token_ids"]
            values["mask"] += [0] * len(mask) if i in trained else [int(m) for m in mask]
            for name, key in PER_SAMPLED.items():
                sampled = iter(nodes[i].get(key) or ())
                values[name] += [next(sampled, None) if m else None for m in mask]
        trained.update(i for i in path if nodes[i].get("sampled"))
        begin = first_trained(values["mask"])
        if begin < len(values["mask"]):
            row: dict[str, Any] = {name: x[begin:] for name, x in values.items()}
            row |= {n: None for n in PER_SAMPLED if all(x is None for x in row[n])}
            yield {**row, "group_id": prompt_id(values["tokens"][:begin])}


def slime(file: Bytes, limit: int = LIMIT) -> tuple[Source, Iterator[Row]]:
    """Return the kind of a debug dump of slime or miles, and its samples.

    Train dumps hold the trainer's log-probs beside the engine's, rollout dumps the engine's alone; token fields cover
    the response, `tokens` prompt and response. A sample with `remove_sample` trains on nothing; slime masks it after it
    has dumped the rollout. miles writes train dumps per rank: tensor-parallel ranks repeat the samples, pipeline stages
    before the last have no log-probs of the trainer, and with context parallelism a rank has slices only, which cannot
    be read alone; nor are its dumps of single calls of the policy loss, which repeat the samples.

    Source: slime 624b824, slime/observability/train_data_utils.py and slime/utils/types.py; miles 31f1ca9.

    Raises: `NotRead` for a dump that other dumps make superfluous; `RecordError` if the file asks for anything but
        data, takes more than `limit` bytes, or holds no samples.
    """
    payload = load_torch(file, limit)
    if not isinstance(payload, Mapping):
        raise RecordError(f"the file holds a {type(payload).__name__}, no debug dump of slime")
    if "ppo_kl" in payload:
        raise NotRead(
            "the dump holds one rank's part of one call of miles' policy loss; read train_data or rollout_data instead"
        )
    by_rank, rewards = "rollout_data" in payload, payload.get("raw_reward")
    samples = payload.get("samples")
    if by_rank:  # a rank's dump holds its samples by column
        if (payload.get("cp_size") or 1) > 1:
            raise NotRead(
                f"the dump holds one of {payload['cp_size']} context-parallel slices of each sequence; "
                "dump with context parallelism off, or use the rollout dump"
            )
        data = payload["rollout_data"]
        n, rewards = len(data["response_lengths"]), _rewards_of_rank(data)
        columns = {k: v for k, v in data.items() if isinstance(v, list | tuple) and len(v) == n}
        samples = [{name: values[i] for name, values in columns.items()} for i in range(n)]
    if not isinstance(samples, list):
        raise RecordError("the file holds no samples: no debug dump of slime")
    if by_rank:
        source = MILES_TRAIN
    elif any("response_lengths" in s for s in samples):
        source = SLIME_TRAIN
    else:
        source = MILES_ROLLOUT if "metadata" in payload else SLIME_ROLLOUT
    return source, _rows(samples, payload.get("rollout_id"), rewards)


def _rewards_of_rank(data: Mapping[str, Any]) -> list[Any] | None:
    """The rewards of a rank's samples: `raw_reward` is of the whole rollout, of which `partition` names the rank's.

    None where the dump does not say which are whose.
    """
    n, rewards, places = len(data["response_lengths"]), plain(data.get("raw_reward")), plain(data.get("partition"))
    if rewards is None:
        return None
    if places is not None and len(places) == n and all(0 <= int(place) < len(rewards) for place in places):
        return [rewards[int(place)] for place in places]
    return list(rewards) if len(rewards) == n else None


def distinct(files: Sequence[str], limit: int) -> list[str]:
    """Select those of miles' train dumps that hold every sample of a rollout once; dumps with log-probs first.

    A file that cannot be read stays, for the reader to report.
    """
    ranks: dict[object, list[tuple[bool, int, frozenset[int]]]] = {}
    kept = set()
    for i, file in enumerate(files):
        contents = _contents(file, fingerprint(file), limit)
        if contents is None:
            kept.add(i)
        else:
            rollout, trained, samples = contents
            ranks.setdefault((os.path.dirname(file), rollout), []).append((not trained, i, samples))
    for alike in ranks.values():
        covered: frozenset[int] = frozenset()
        for _, i, samples in sorted(alike, key=lambda rank: rank[:2]):
            if samples - covered:
                kept.add(i)
                covered |= samples
    return [file for i, file in enumerate(files) if i in kept]


@lru_cache(maxsize=1 << 14)
def _contents(file: str, version: str, limit: int) -> tuple[object, bool, frozenset[int]] | None:
    """The rollout of a rank's dump, whether it has the trainer's log-probs, and which samples."""
    try:
        with opened(file) as f:
            payload = load_torch(f, limit)
            data = payload["rollout_data"]
            samples = data["sample_indices"]
            return payload["rollout_id"], bool(data.get("log_probs")), frozenset(map(int, samples))
    except Exception:  # damaged or hostile bytes raise anything; the reader reports it
        return None


def _rows(samples: Sequence[Mapping[str, Any]], step: Any, rewards: Any) -> Iterator[Row]:
    for i, sample in enumerate(samples):
        train_dump = "response_lengths" in sample
        length = int(sample["response_lengths" if train_dump else "response_length"])
        columns = SLIME_TRAIN_COLUMNS if train_dump else SLIME_ROLLOUT_COLUMNS
        row: dict[str, Any] = {name: _listed(sample.get(column)) for name, column in columns.items()}
        tokens = plain(sample.get("tokens"))
        if tokens is not None:
            begin = len(tokens) - length
            row["tokens"], row["group_id"] = _listed(tokens[begin:]), prompt_id(tokens[:begin])
        if sample.get("group_index") is not None:
            row["group_id"] = int(sample["group_index"])
        reward, place = None, sample.get("rollout_position", i)
        # The batch's rewards are in the order of the rollout, samples that were left out included.
        if rewards is not None and place < len(rewards) and len(rewards) >= len(samples):
            reward = rewards[place]
        reward = sample.get("reward", reward)
        reward = None if isinstance(reward, Inert) else plain(reward)
        row["reward"] = reward if isinstance(reward, int | float) else None
        row["step"], row["response_length"] = step, length
        row |= drawn_by_versions(sample.get("weight_versions"), length)
        row["prompt"], row["completion"] = sample.get("prompt"), sample.get("response")
        if "status" in sample or sample.get("truncated") is not None:
            row["truncated"] = int(sample.get("truncated") or sample.get("status") == "truncated")
        if sample.get("remove_sample"):
            row["mask"] = [0] * length
        yield row


def _listed(values: Any) -> Any:
    """An empty list stands for one that was never filled. Raises: `RecordError` for what is no list of numbers."""
    values = plain(values) if isinstance(values, Array | Inert) else values
    return None if values is None or len(values) == 0 else plain(values)


def miles_columns(row: Mapping[str, Any]) -> Row:
    """A row of miles' dashboard columns: `tokens` covers the prompt too."""
    begin = len(row["tokens"]) - int(row["response_length"])
    return {
        "logp_rollout": row.get("rollout_log_probs"),
        "mask": row.get("loss_mask"),
        "tokens": row["tokens"][begin:],
        "group_id": prompt_id(row["tokens"][:begin]),
    }


def skyrl(file: Bytes, limit: int = LIMIT) -> tuple[Source, Iterator[Row]]:
    """That a pickle is SkyRL's dumped training input (`trainer.dump_data_batch = true`), and its sequences.

    Response tensors `[sequences, response]` are right-aligned under `response_mask`; `sequences` holds prompt and
    response, right-aligned too. Rewards were removed before the dump, and the prompts' ids with them; the last
    `pad_size` rows are copies that fill up the batch.

    Source: SkyRL a956457 and 0.4.0, skyrl/backends/skyrl_train/training_batch.py and skyrl/train/trainer.py.

    Raises: `RecordError` if the pickle is none of SkyRL's, or asks for anything but data.
    """
    batch = load_pickle(file, limit)
    state = getattr(batch, "state", None)
    if not isinstance(batch, TensorBatch) or not isinstance(state, Mapping):
        raise RecordError("the pickle holds no training batch of SkyRL")
    wanted = {*SKYRL.columns.values(), "response_mask", "sequences", "attention_mask", "rewards"}
    tensors = {
        name: tensor_of(x, limit)
        for name, x in state["batch_dict"].items()
        if name in wanted and x is not None and x.get("format") not in ("tensor_list", "packed_tensor", "numpy_view")
    }
    padding = (state.get("metadata") or {}).get("pad_size") or 0
    response = (tensors["response_mask"] if "response_mask" in tensors else tensors["loss_mask"]).bool()

    def rows() -> Iterator[Row]:
        for i in range(len(response) - padding):
            row: dict[str, Any] = {n: tensors[c][i][response[i]] for n, c in SKYRL.columns.items() if c in tensors}
            if "rewards" in tensors:
                row["reward"] = float(tensors["rewards"][i].sum())
            if "sequences" in tensors:
                sequence = tensors["sequences"][i]
                row["tokens"] = sequence[-len(response[i]) :][response[i]]
                if "attention_mask" in tensors:
                    sequence = sequence[tensors["attention_mask"][i].bool()]
                row["group_id"] = prompt_id(sequence[: len(sequence) - int(response[i].sum())])
            yield row

    return SKYRL, rows()
