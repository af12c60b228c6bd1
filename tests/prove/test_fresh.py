"""Fresh answers are read from rollouts and from plain rows, and what cannot be compared is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offdrift.certificate.paired import certify_fresh
from offdrift.errors import RecordError
from offdrift.prove.fresh import answer_files, paired_view, read_answers
from offdrift.records import Provenance, Rollouts, Sampling
from offdrift.records.store import write
from tests.show.screens import flat, printed

PROVENANCE = Provenance("coin", "0", "none", "float32", None, Sampling(max_tokens=1))


def rollouts(prompts: list[int], rewards: list[float], *, version: int = 0, selected: bool = False) -> Rollouts:
    b = len(prompts)
    return Rollouts(
        tokens=torch.zeros(b).long(), logp_rollout=torch.full((b,), -1.0), cu_seqlens=torch.arange(b + 1),
        rollout_version=torch.full((b,), version), prompt_tokens=torch.tensor(prompts),
        prompt_cu_seqlens=torch.arange(b + 1), group_ids=torch.tensor(prompts), finish=("stop",) * b,
        provenance=replace(PROVENANCE, selected=selected), rewards=torch.tensor(rewards),
    )  # fmt: skip


def rows(path: Path, values: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in values) + "\n")
    return path


def test_rows_of_any_kind_are_answers(tmp_path):
    messages = [{"role": "user", "content": "2 + 2"}]
    given = [
        {"prompt": messages, "reward": 1, "source": 3},
        {"prompt": "b", "reward": True, "source": 3},
        {"prompt": "b", "reward": 0.5, "group_id": 7, "source": 4},
    ]
    plain = read_answers(rows(tmp_path / "a.jsonl", given), cluster="source")
    table = [{**row, "reward": float(row["reward"])} for row in given[1:]]
    pq.write_table(pa.Table.from_pylist(table, pa.schema({"prompt": "string", "reward": "double", "group_id": "int64",
                                                          "source": "int64"})), tmp_path / "b.parquet")  # fmt: skip
    stored = read_answers(tmp_path / "b.parquet", cluster="source")
    assert plain.rewards.tolist() == [1, 1, 0.5]
    assert len(set(plain.prompts)) == 2
    assert len(set(plain.groups)) == 3, "a group_id tells draws of one prompt apart"
    assert plain.clusters is not None
    assert stored.clusters is not None
    assert plain.clusters.tolist()[1:] == stored.clusters.tolist()
    assert stored.prompts.tolist() == plain.prompts.tolist()[1:]
    ours = read_answers(write(rollouts([4, 4, 5], [0.0, 1.0, 1.0]), tmp_path / "c.parquet"))
    assert ours.rewards.tolist() == [0, 1, 1]
    assert len(set(ours.prompts)) == 2
    assert ours.clusters is None


def test_a_folder_is_one_policy(tmp_path):
    for i in range(2):
        rows(tmp_path / f"{i}.jsonl", [{"prompt": "a", "reward": i}, {"prompt": f"b{i}", "reward": i}])
    (tmp_path / "notes.txt").write_text("")
    both = read_answers(tmp_path)
    assert len(answer_files(tmp_path)) == 2
    assert (len(set(both.prompts)), len(set(both.groups))) == (3, 4)


REFUSED = [
    ([{"prompt": "a"}], "row 1: no reward"),
    ([{"prompt": "a", "reward": 1}, {"reward": 1}], "row 2: no prompt"),
    ([{"prompt": "a", "reward": "good"}], "'good' is no finite number"),
    ([{"prompt": "a", "reward": float("nan")}], "nan is no finite number"),
    ([[1]], "no prompt and no reward"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=range(len(REFUSED)))
def test_rows_without_what_is_needed_are_refused_by_number(tmp_path, given, words):
    with pytest.raises(RecordError, match=words):
        read_answers(rows(tmp_path / "a.jsonl", given))


def test_answers_that_are_no_sample_of_one_policy_are_refused(tmp_path):
    write(rollouts([1], [1.0], selected=True), tmp_path / "selected.parquet")
    with pytest.raises(RecordError, match="chosen by the rewards"):
        read_answers(tmp_path / "selected.parquet")
    for version in (3, 4):
        write(rollouts([version], [1.0], version=version), tmp_path / "two" / f"{version}.parquet")
    with pytest.raises(RecordError, match=r"several weights \(versions \[3, 4\]\)"):
        read_answers(tmp_path / "two")
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(RecordError, match="cannot read"):
        read_answers(tmp_path / "torn.jsonl")
    (tmp_path / "bare").mkdir()
    for nothing in (tmp_path / "bare", tmp_path / "absent.jsonl", tmp_path / "torn.txt"):
        with pytest.raises(RecordError, match="holds no answers"):
            read_answers(nothing)
    silent = write(rollouts([1], [1.0]).with_(rewards=None), tmp_path / "silent.parquet")
    with pytest.raises(RecordError, match="has no rewards"):
        read_answers(silent)


@pytest.mark.parametrize("better", [True, False])
def test_the_view_names_both_policies(tmp_path, better):
    g = np.random.default_rng(0)
    files = []
    for name, p in zip("ab", (0.2, 0.7) if better else (0.5, 0.5), strict=True):
        given = [{"prompt": f"p{i}", "reward": float(g.random() < p)} for i in range(200)]
        files.append(rows(tmp_path / f"{name}.jsonl", given))
    proof = certify_fresh(*map(read_answers, files))
    text = flat(printed(paired_view(proof, ["before", "after"], width=100), 100))
    assert proof.certified == better
    assert proof.verdict in text
    assert "J(A), before" in text
    assert "J(B), after" in text
    assert ("no certificate" in text) != better


# -- prompts that come again, without group ids --------------------------------------------------------------


def lopsided(folder: Path, *, groups: bool) -> list[Path]:
    """One prompt has 55 % of 600 draws and loses .5 by B, the others gain .3: over draws, B is worse by .14."""
    g = np.random.default_rng(0)
    ids = np.where(np.arange(600) < 330, 0, np.arange(600))
    share = {"a": np.where(ids == 0, 0.9, 0.3), "b": np.where(ids == 0, 0.4, 0.6)}
    return [
        rows(
            folder / f"{name}.jsonl",
            [
                {"prompt": f"p{i}", "reward": int(g.random() < p)} | ({"group_id": n} if groups else {})
                for n, (i, p) in enumerate(zip(ids, share[name], strict=True))
            ],
        )
        for name in "ab"
    ]


def test_prompts_that_come_unequally_often_have_two_readings_also_without_group_ids(tmp_path):
    a, b = (read_answers(path) for path in lopsided(tmp_path, groups=False))
    with pytest.raises(
        RecordError, match=r"A: 600 answers without group ids are to 271 distinct prompts.*listed.*drawn"
    ):
        certify_fresh(a, b)
    with pytest.raises(RecordError, match=r"A: 600 answers .*give the answers to each draw a group_id of their own"):
        certify_fresh(a, b, prompts="drawn")
    merged = certify_fresh(a, b, prompts="listed")
    assert merged.certified
    assert "distinct prompts, each counted once" in merged.verdict
    a, b = (read_answers(path) for path in lopsided(tmp_path, groups=True))
    over_draws = certify_fresh(a, b, prompts="drawn")
    assert not over_draws.certified
    assert over_draws.gain.mean == pytest.approx(-0.14, abs=0.06)


def test_as_many_answers_to_every_prompt_are_a_list_that_was_answered_several_times(tmp_path):
    g = np.random.default_rng(1)
    a, b = (
        read_answers(
            rows(tmp_path / name, [{"prompt": f"p{i % 200}", "reward": int(g.random() < p)} for i in range(800)])
        )
        for name, p in (("a.jsonl", 0.3), ("b.jsonl", 0.6))
    )
    proof = certify_fresh(a, b)
    assert (proof.certified, proof.prompts, proof.design) == (True, 200, "listed")
    assert "none of them came twice" not in proof.verdict
