"""Which files of a framework's run are read, and which of their rows count.

The dumps are laid out as the frameworks lay them out (commits in `docs/logs.md`), around samples that
their own writers made.
"""

import collections
import datetime
import decimal
import enum
import fractions
import json
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offdrift.audit.partial import Job, work
from offdrift.errors import RecordError
from offdrift.records.readers import detect, pieces
from offdrift.records.readers.formats.table import PAYLOADS, SOURCES, function
from tests.records.samples import LOGS, one, read_all

MILES = LOGS / "miles"


def rank_dump(path: Path, rank: int, samples: list[int], **changed: Any) -> None:
    """miles' dump of one rank that holds some of the three samples."""
    payload = torch.load(MILES / "train_data" / "7_0.pt", weights_only=True)
    data = payload["rollout_data"]
    n = len(data["response_lengths"])
    cut = {k: [v[i] for i in samples] if isinstance(v, list | tuple) and len(v) == n else v for k, v in data.items()}
    cut = {**cut, "sample_indices": samples, **changed.pop("data", {})}
    cut = {k: v for k, v in cut.items() if v is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**payload, "rank": rank, "rollout_data": cut, **changed}, path)


class Settings:
    """A class of a user's own, which an audit cannot import."""

    def __init__(self) -> None:
        self.path = Path("/data")

    class Status(enum.Enum):
        """Protocol 2 names it by `getattr` of the class around it."""

        DONE = "done"


def user_metadata() -> dict[Any, Any]:
    """What people put into slime's `Sample.metadata`: objects that reduce, build, append and set items."""
    return {
        "counts": collections.defaultdict(list, {"a": [1, 2]}),
        "when": datetime.datetime(2026, 11, 27, 1, 2, tzinfo=datetime.UTC),
        "where": Path("/data/problems.jsonl"),
        "names": np.array(["a", "bc"]),
        "objects": np.array([{}, None], dtype=object),
        "name": np.str_("x"),
        "share": fractions.Fraction(1, 3),
        "decimal": decimal.Decimal("1.5"),
        "id": uuid.UUID(int=5),
        "own": Settings(),
        "within": Settings.Status.DONE,
        "function": len,
        "file": os.stat("/"),
        "counter": collections.Counter("aab"),
        "queue": collections.deque([1, 2]),
        "sets": [{1, 2}, frozenset({3})],
        "complex": 1j,
        (1, 2): "a tuple as a key",
        frozenset({1}): "another",
        Path("/x"): "and another",
        "pattern": re.compile("a+"),
        "range": range(3),
        "kind": int,
        "ran": subprocess.CompletedProcess(["python", "answer.py"], 1, b"", b"no"),
        "failed": [subprocess.TimeoutExpired("python", 5), OSError("no")],
        "records": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        "experts": torch.zeros(2, dtype=torch.uint16),
        "images": [torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.complex64)],
    }


@pytest.mark.parametrize("folder", ["slime/train_data", "slime/rollout_data"])
def test_what_a_user_put_beside_the_samples_of_slime_does_not_hide_them(tmp_path: Path, folder: str) -> None:
    (path,) = (f for f in (LOGS / folder).glob("*.pt") if not f.name.startswith("eval"))
    payload = torch.load(path, weights_only=False)
    for sample in payload["samples"]:
        sample["metadata"] = user_metadata()
    torch.save({**payload, "about": user_metadata()}, tmp_path / path.name)
    _, batches, bad = read_all(tmp_path)
    _, expected, _ = read_all(path)
    assert bad == []
    assert len(batches) == len(expected) >= 1
    for batch, right in zip(batches, expected, strict=True):
        assert torch.equal(batch.tokens, right.tokens)
        assert torch.equal(batch.logp_rollout, right.logp_rollout)


class Command:
    """Asks for a function that acts."""

    def __init__(self, function: Any, *words: Any) -> None:
        self.asked = (function, words)

    def __reduce__(self) -> Any:
        return self.asked


@pytest.mark.parametrize("function", [eval, exec, open, os.system, __import__])
def test_what_acts_is_said_aloud_beside_the_samples_of_slime(tmp_path: Path, function: Any) -> None:
    payload = torch.load(LOGS / "slime" / "rollout_data" / "7.pt", weights_only=False)
    payload["samples"][0]["metadata"] = {"u": Command(function, f"open({str(tmp_path / 'ran')!r}, 'w')")}
    torch.save(payload, tmp_path / "7.pt")
    with pytest.raises(RecordError, match=function.__name__):
        read_all(tmp_path)
    assert os.listdir(tmp_path) == ["7.pt"]


@pytest.mark.parametrize("named", ["", "3.straw.json"])
def test_archives_of_vime_are_named_with_the_way_out(tmp_path: Path, named: str) -> None:
    """Their records lie in a store that its own code alone reads."""
    (tmp_path / "3.straw.json").write_text(json.dumps({"format": "vime.straw-debug", "version": 1}))
    with pytest.raises(RecordError, match="export_pt"):
        read_all(tmp_path / named)
    with pytest.raises(RecordError, match="does not exist") as caught:
        read_all(tmp_path / "4.jsonl")
    assert "straw" not in str(caught.value)


@pytest.mark.parametrize("value", [Path("/x"), np.array(["a"]), Settings(), [Path("/x")]])
def test_an_object_where_numbers_belong_is_refused_by_its_name(tmp_path: Path, value: Any) -> None:
    payload = torch.load(LOGS / "slime" / "train_data" / "7.pt", weights_only=False)
    payload["samples"][1]["rollout_log_probs"] = value
    torch.save(payload, tmp_path / "7.pt")
    name = {"list": r"logp_rollout holds .*Path", "ndarray": "NumPy array of type '<U1'"}.get(type(value).__name__)
    try:
        _, _, bad = read_all(tmp_path)
        said = "; ".join(b.reason for b in bad)
    except RecordError as e:
        said = str(e)
    assert re.search(name or type(value).__name__, said), said


TOKENS = ("advantages", "loss_mask", "loss_masks", "returns", "kl", "entropy", "values")


def test_samples_without_a_token_are_no_bad_rows(tmp_path: Path) -> None:
    """An answer of no token, in the middle of slime's dumps."""
    for name in ("train_data", "rollout_data"):
        payload = torch.load(LOGS / "slime" / name / "7.pt", weights_only=False)
        first = payload["samples"][0]
        key = "response_lengths" if name == "train_data" else "response_length"
        empty = {**first, key: 0, "tokens": first["tokens"][: len(first["tokens"]) - int(first[key])]}
        empty |= {k: x[:0] for k, x in first.items() if x is not None and ("log_probs" in k or k in TOKENS)}
        payload["samples"].insert(1, empty)
        (tmp_path / name).mkdir()
        torch.save(payload, tmp_path / name / "7.pt")
        _, batches, bad = read_all(tmp_path / name)
        assert bad == []
        assert sum(b.num_sequences for b in batches) == len(payload["samples"])
        assert sorted(x for b in batches for x in b.segments.lengths.tolist())[0] == 0


def test_raw_rewards_of_miles_are_those_of_the_ranks_samples(tmp_path: Path) -> None:
    payload = torch.load(MILES / "train_data" / "7_0.pt", weights_only=False)
    data, n = payload["rollout_data"], len(payload["rollout_data"]["response_lengths"])
    rewards = [10.0 * i for i in range(n + 3)]
    for partition, expected in (
        (list(range(3, 3 + n)), rewards[3:]),
        (torch.tensor([0, 2, 4]).numpy(), [0.0, 20.0, 40.0]),
        (None, None),  # of other ranks, too, and nothing says which
    ):
        changed = {k: x for k, x in data.items() if k != "partition"} | {"raw_reward": rewards}
        changed |= {} if partition is None else {"partition": partition}
        torch.save({**payload, "rollout_data": changed}, tmp_path / "7_0.pt")
        _, batches, bad = read_all(tmp_path)
        assert bad == []
        found = [r for b in batches if b.rewards is not None for r in b.rewards.tolist()]
        assert found == (expected or [])


def test_the_end_that_open_instruct_appends_to_an_empty_answer_is_no_hole(tmp_path: Path) -> None:
    (file,) = (LOGS / "open_instruct").glob("*_rollouts_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answered = {**rows[0], "finish_reason": "stop"}
    empty = {**answered, "response_tokens": [2], "logprobs": [float("nan")]}
    hole = {**answered, "logprobs": [float("nan"), *answered["logprobs"][1:]]}
    file = tmp_path / file.name
    file.write_text("".join(json.dumps(row) + "\n" for row in (answered, empty, hole)))
    _, batches, bad = read_all(tmp_path)
    assert bad == []
    holes = [n for b in batches for n in b.unscored.get("logp_rollout/missing", torch.zeros(b.num_sequences)).tolist()]
    assert sorted(holes) == [0, 0, 1]


def test_ranks_of_miles_that_hold_the_same_samples_count_once(tmp_path: Path) -> None:
    """Tensor parallelism of 2, a pipeline of 2 stages and 2 shards of data, in two rollouts."""
    shards = [[0, 2], [1]]
    for rollout in (7, 8):
        for rank in range(8):
            stage, shard, _ = rank // 4, (rank // 2) % 2, rank % 2
            # Only the last stage computes log-probs.
            lacks = {} if stage else {"log_probs": None, "ref_log_probs": None}
            path = tmp_path / "train_data" / f"{rollout}_{rank}.pt"
            rank_dump(path, rank, shards[shard], data=lacks, rollout_id=rollout)
    found, batches, bad = read_all(tmp_path)
    assert (found.format, bad) == ("miles-train", [])
    assert sum(b.num_sequences for b in batches) == 6
    assert sorted(Path(f).name for f in found.files) == ["7_4.pt", "7_6.pt", "8_4.pt", "8_6.pt"]
    assert all(b.logp_old is not None for b in batches)
    assert "not reading 12 files of ranks that hold the samples of another rank" in found.description
    # A rank that cannot be read is reported, and another one with the same samples is read.
    (tmp_path / "train_data" / "7_4.pt").write_bytes(b"damaged")
    found, batches, bad = read_all(tmp_path)
    assert sum(b.num_sequences for b in batches) == 6
    assert [Path(b.file).name for b in bad] == ["7_4.pt"]


def miles_rollout(path: Path) -> None:
    """miles' rollout dump: slime's with its metadata."""
    payload = torch.load(LOGS / "slime" / "rollout_data" / "7.pt", weights_only=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**payload, "metadata": {}}, path)


def loss_call(path: Path) -> None:
    """What miles' `maybe_dump_policy_loss_debug` writes on one context-parallel rank."""
    part = torch.tensor([-1.0, -2.0])
    sample = {
        "index": 0, "total_length": 9, "response_length": 4, "train_log_probs": part,
        "old_log_probs": part, "advantages": part, "local_loss_mask": torch.tensor([1.0, 0.0]),
        "rollout_log_probs": part, "train_rollout_abs_diff": part * 0,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    call = {"rank": 0, "call": 0, "samples": [sample], "ppo_kl": part, "pg_loss": part, "finite": {}}
    torch.save(call, path)


def test_slices_and_single_calls_of_miles_are_no_sequences(tmp_path: Path) -> None:
    """A run with context parallelism: the rollout dump is what can be read."""
    for rank in range(2):
        rank_dump(tmp_path / "train_data" / f"7_{rank}.pt", rank, [0, 1, 2], cp_rank=rank, cp_size=2)
        loss_call(tmp_path / "policy_loss_debug" / f"rank_{rank}_call_0.pt")
    miles_rollout(tmp_path / "rollout_data" / "7.pt")
    found, (batch,), bad = read_all(tmp_path)
    assert (found.format, bad) == ("miles-rollout", [])
    assert batch.num_sequences == 3
    assert batch.response_lengths.tolist() == [3, 1, 4]
    assert "one of 2 context-parallel slices" in found.description
    moved = tmp_path / "elsewhere" / "calls.pt"
    loss_call(moved)
    with pytest.raises(RecordError, match="one rank's part of one call of miles' policy loss"):
        detect([str(moved)])
    with pytest.raises(RecordError, match="evaluation or metadata"):
        detect([str(tmp_path / "policy_loss_debug")])


def test_evaluations_of_miles_are_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "dashboard_columns"
    shutil.copytree(MILES / "dashboard_columns", folder)
    shutil.copy(folder / "rollout_7.parquet", folder / "rollout_eval_0.parquet")
    found, (batch,), _ = read_all(tmp_path)
    assert [Path(f).name for f in found.files] == ["rollout_7.parquet"]
    assert batch.num_sequences == 3
    assert "not reading 1 file of evaluation" in found.description


def test_samples_that_slime_removes_do_not_train(tmp_path: Path) -> None:
    payload = torch.load(LOGS / "slime" / "rollout_data" / "7.pt", weights_only=True)
    payload["samples"][0]["remove_sample"] = True
    assert payload["samples"][0]["loss_mask"] is not None
    torch.save(payload, tmp_path / "7.pt")
    kept, all_of_them = one(tmp_path), one(LOGS / "slime" / "rollout_data")
    assert kept.num_sequences == 3
    assert kept.cu_seqlens.diff().tolist() == [0, *all_of_them.cu_seqlens.diff().tolist()[1:]]


def test_train_dumps_of_slime_say_what_was_truncated(tmp_path: Path) -> None:
    payload = torch.load(LOGS / "slime" / "train_data" / "7.pt", weights_only=True)
    for sample, cut in zip(payload["samples"], (0, 1, 0), strict=True):
        sample["truncated"] = cut
    torch.save(payload, tmp_path / "7.pt")
    batch = one(tmp_path)
    assert batch.truncated.tolist() == [0, 1, 0]


def test_every_function_that_the_table_of_formats_names_is_there() -> None:
    names = {name for s in SOURCES for name in (s.adapt, s.amend, s.distinct) if name} | set(PAYLOADS.values())
    assert len(names) >= 8
    assert all(callable(function(name)) for name in names)


def test_rewards_of_dynamic_sampling_belong_to_the_rows(tmp_path: Path) -> None:
    """`rewards` are then those of every sequence that was drawn, in another order."""
    path = tmp_path / "train_data_step7.jsonl"
    own = map(json.loads, (LOGS / "nemo_rl" / path.name).read_text().splitlines())
    rows = [{**row, "filtered_rewards": row["rewards"], "rewards": [9.0]} for row in own]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert torch.equal(one(path).rewards, one(LOGS / "nemo_rl").rewards)


def test_a_folder_with_nemo_rls_validation_alone(tmp_path: Path) -> None:
    (tmp_path / "val_data_step7.jsonl").write_text('{"content": ["x"], "rewards": [1.0], "idx": 0}\n')
    with pytest.raises(RecordError, match=r"data_plane.enabled\) does not write: record"):
        detect([str(tmp_path)])


VERL = {"input": "q", "output": "a", "gts": "1", "score": 1.0, "step": 3}


def test_validation_of_verl_is_no_training(tmp_path: Path) -> None:
    """verl writes both alike; only its validation has `reward` beside `score`."""
    for name, extra in (("val", {"reward": 1.0, "acc": 1.0}), ("train", {"request_id": "x", "acc": 1.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "3.jsonl").write_text(json.dumps({**VERL, **extra}) + "\n")
    found, (batch,), _ = read_all(tmp_path)
    assert [Path(f).parent.name for f in found.files] == ["train"]
    assert batch.num_sequences == 1
    assert "not reading 1 file of verl's validation dump" in found.description
    alone, (batch,), _ = read_all(tmp_path / "val")
    assert alone.format == "verl-validation"
    assert "nothing that was trained on" in alone.description


def test_tokens_of_tools_in_open_instruct_are_no_log_probs(tmp_path: Path) -> None:
    """The engine's log-probs have exact zeros where a tool answered; a mask is not logged."""
    row = {
        "step": 1, "sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [1], "response_tokens": [2, 3, 4, 5],
        "reward": 1.0, "advantage": 0.5, "finish_reason": "stop", "logprobs": [-1.0, 0.0, 0.0, -2.0],
    }  # fmt: skip
    called = {**row, "request_info": {"num_calls": 1, "tool_calleds": True, "tool_outputs": "ok"}}
    certain = {**row, "request_info": {"num_calls": 0, "tool_calleds": False}}
    path = tmp_path / "run_rollouts_000000.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (called, certain, row)))
    batch = one(path)
    assert batch.cu_seqlens.diff().tolist() == [2, 4, 4]
    assert batch.logp_rollout[:2].tolist() == [-1.0, -2.0]
    assert batch.in_response[:2].tolist() == [0, 3]


def node(parent: int | None, tokens: list[int], sampled: int, **more: Any) -> dict[str, Any]:
    """A message of a trace; its last tokens are sampled."""
    n = len(tokens)
    mask = [i >= n - sampled for i in range(n)]
    message = {"message": {"role": "assistant"}, "sampled": sampled > 0, "token_ids": tokens, "mask": mask, **more}
    if sampled:
        message["logprobs"] = [-0.5 * t for t in tokens[n - sampled :]]
    return message if parent is None else {**message, "parent": parent}


def episode(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    trace = {
        "version": 1, "agent": {"name": "agent", "trainable": True, "config": {}}, "nodes": nodes,
        "rewards": {"right": {"score": 1.0, "weight": 0.5}, "style": {"score": 2.0, "weight": 1.0}},
        "calls": [{"node": 1, "finish_reason": "stop"}], "ok": True,
    }  # fmt: skip
    work = {"type": "train", "step": 2, "policy": {"start": 4, "end": 4}}
    return {
        "id": "e", "env": {"id": "e"}, "task": {"type": "T"}, "group": {"id": "g"}, "ok": True, "errors": [],
        "run": {"type": "train", "id": "r", "work": work}, "traces": [{**trace, **more}],
    }  # fmt: skip


def traces(folder: Path, *records: Any, where: str = "train/effective") -> None:
    path = folder / "rollouts" / "step_3" / where / "traces.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


FORK = [
    node(None, [1, 2], 0),
    node(0, [3, 4, 5], 2, advantages=[1.0, 2.0]),
    node(1, [6], 0),
    node(2, [7, 8], 2, advantages=[3.0, 4.0]),
    node(2, [9], 1, advantages=[5.0]),
]


def test_episodes_of_prime_rl(tmp_path: Path) -> None:
    frozen = episode(FORK)
    frozen["traces"][0]["agent"]["trainable"] = False
    traces(tmp_path, episode(FORK), frozen)
    traces(tmp_path, *[episode(FORK)] * 5, where="train/all")
    traces(tmp_path, *[episode(FORK)] * 5, where="eval/effective")
    found, (batch,), bad = read_all(tmp_path)
    assert (found.framework, found.format, bad) == ("prime-rl", "prime-rl-traces", [])
    assert len(found.files) == 1
    # Two paths; what they share trains in the first.
    assert batch.num_sequences == 2
    assert batch.step.tolist() == [3, 3]
    assert batch.tokens.tolist() == [4, 5, 7, 8, 9]
    assert batch.cu_seqlens.tolist() == [0, 4, 5]
    assert batch.logp_rollout.tolist() == [-2.0, -2.5, -3.5, -4.0, -4.5]
    assert batch.advantages.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert batch.rewards.tolist() == [2.5, 2.5]
    assert batch.rollout_version.tolist() == [4] * 5
    assert len(batch.group_ids.unique()) == 1
    assert "token_export" in found.description


def test_one_stream_of_episodes_has_their_steps_and_no_evaluation(tmp_path: Path) -> None:
    """prime-rl since September 2026; the trainer's streams are annotations, which its own function folds into nodes."""
    first, second, evaluation, folded = (episode(FORK) for _ in range(4))
    second["run"]["work"]["step"] = 7
    evaluation["run"] |= {"type": "eval", "work": {"type": "eval", "step": 7}}
    streams = {"trainer_logprobs": [-1.0, -2.0], "entropies": [0.5, 0.25]}
    folded["traces"][0]["nodes"] = [FORK[0], {**FORK[1], **streams}]
    folded["run"]["work"]["step"] = 7
    path = tmp_path / "traces" / "00000.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(r) + "\n" for r in (first, second, evaluation, folded)))
    update = {"version": 1, "trace_id": "t", "info": {}, "branches": [{"index": 0, "trainer_logprobs": [None, -1.0]}]}
    annotations = tmp_path / "traces" / "annotations" / "trainer" / "00000.jsonl"
    annotations.parent.mkdir(parents=True)
    annotations.write_text(json.dumps(update) + "\n")
    found, (batch,), bad = read_all(tmp_path)
    assert (found.format, len(found.files), bad) == ("prime-rl-traces", 1, [])
    assert batch.step.tolist() == [2, 2, 7, 7, 7]
    assert batch.logp.tolist() == [-1.0, -2.0]  # of what was folded alone: the other rows do not say
    assert batch.logp_rollout.tolist() == [-2.0, -2.5]


def test_episodes_lie_beside_token_exports(tmp_path: Path) -> None:
    shutil.copytree(LOGS / "prime_rl" / "token_exports", tmp_path / "token_exports")
    traces(tmp_path, episode(FORK))
    assert detect([str(tmp_path)]).format == "prime-rl"


@pytest.mark.parametrize(
    "nodes",
    [[{**FORK[0], "parent": 0}], [{**FORK[0], "parent": 7}], [FORK[1]], [{}], "x", [{**FORK[1], "mask": 3}]],
    ids=str,
)  # fmt: skip
def test_a_trace_that_is_none_is_a_bad_row(tmp_path: Path, nodes: Any) -> None:
    traces(tmp_path, episode(FORK), episode(nodes))
    _, (batch,), bad = read_all(tmp_path)
    assert batch.num_sequences == 2
    assert [b.row for b in bad] in ([2], [])
    assert bad or nodes == [FORK[1]]


def test_prompts_that_two_ranks_share_count_once(tmp_path: Path) -> None:
    """prime-rl packs the responses to one prompt on any rank."""
    source = LOGS / "prime_rl" / "token_exports" / "step_7" / "rank_0.jsonl"
    first, second, third = source.read_text().splitlines()
    folder = tmp_path / "token_exports" / "step_7"
    folder.mkdir(parents=True)
    (folder / "rank_0.jsonl").write_text(first + "\n" + third + "\n")
    (folder / "rank_1.jsonl").write_text(second + "\n")
    found = detect([str(tmp_path)])
    parts = [work(piece, Job(found)) for piece in pieces(found)]
    tally = parts[0].merge(parts[1]).tally
    assert tally.as_dict()["counts"]["prompts"] == 2
    assert tally.as_dict()["counts"]["sequences"] == 3


def titan_turn(prompt: list[int], completion: list[int], version: int, **more: Any) -> dict[str, Any]:
    """A turn as TitanRL's recorder writes it with `log_tensors` and `log_logprobs`."""
    return {
        "turn_id": 0,
        "min_policy_version": version,
        "max_policy_version": version,
        "completion_message": {"role": "assistant", "content": "x"},
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "completion_logprobs": [-float(token) for token in completion],
        **more,
    }


def titan_rollout(turns: list[dict[str, Any]], group: int = 0, **more: Any) -> dict[str, Any]:
    about = {"is_validation": False, "group_id": group, "rollout_id": 1, "status": "completed", "reward": 2.0}
    return {**about, "reward_breakdown": {}, "advantage": 0.5, "turns": turns, **more}


TITAN_TURNS = [
    titan_turn([90], [1, 2], 5),
    titan_turn([90, 1, 2, 91, 92], [3], 6),
    titan_turn([93], [4, 5], 7),  # its history was edited: another sample
]


def test_rollout_samples_of_titan_rl(tmp_path: Path) -> None:
    """Turns that go on are one sample; a validation and a prompt without an answer are none."""
    cut = titan_rollout([titan_turn([9], [6, 7, 8], 7)], group=1, status="truncated_length", reward=-1.0)
    nothing = titan_rollout([titan_turn([9], [], 7)], group=2)
    lines = [titan_rollout(TITAN_TURNS), titan_rollout(TITAN_TURNS, is_validation=True), cut, nothing]
    (tmp_path / "rollout_samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found, (*batches,), bad = read_all(tmp_path)
    assert (found.framework, found.format, bad) == ("titan-rl", "titan-rl", [])
    assert "log_logprobs" in found.description
    seen = {name: [x for b in batches for x in getattr(b, name).tolist()] for name in ("tokens", "step", "truncated")}
    assert seen == {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "step": [6, 7, 7], "truncated": [0, 0, 1]}
    assert [x for b in batches for x in b.logp_rollout.tolist()] == [-float(t) for t in seen["tokens"]]
    assert [x for b in batches for x in b.advantages.tolist()] == [0.5] * 8
    assert [x for b in batches for x in b.rewards.tolist()] == [2.0, 2.0, -1.0]


def test_titan_rl_without_tensors_shows_texts_and_rewards(tmp_path: Path) -> None:
    """What its recorder writes unless told otherwise."""
    bare = [{k: x for k, x in turn.items() if "token_ids" not in k and "logprobs" not in k} for turn in TITAN_TURNS[:1]]
    (tmp_path / "rollout_samples.jsonl").write_text(json.dumps(titan_rollout(bare)) + "\n")
    found, (batch,), bad = read_all(tmp_path)
    assert (found.format, bad) == ("titan-rl", [])
    assert batch.completions == ("x",)
    assert batch.rewards.tolist() == [2.0]


def test_the_form_of_a_tensor_of_skyrl_since_0_4(tmp_path: Path) -> None:
    """Written by the batch of SkyRL 0.4.0, which names a tensor's form by an enum; one column is bfloat16."""
    found, (batch,), bad = read_all(LOGS / "skyrl_0_4")
    assert (found.format, bad) == ("skyrl", [])
    assert batch.tokens.tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert batch.step.tolist() == [3, 3]
    assert torch.allclose(batch.logp_rollout - 0.1, batch.logp_old, atol=4e-3)
    named = (LOGS / "skyrl_0_4" / "dumped_data" / "global_step_3_training_input.pkl").read_bytes()
    assert named.count(b"numpy") > 0
    other = tmp_path / "global_step_3_training_input.pkl"
    other.write_bytes(named.replace(b"\x8c\x05numpy", b"C\x05numpy"))  # bytes in place of the text
    with pytest.raises(RecordError, match="SkyRL does not"):
        detect([str(other)])
