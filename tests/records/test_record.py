"""`offdrift.record`: what a loop has, padded or packed, is what an audit reads."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offdrift
from offdrift.errors import RecordError, ShapeError
from offdrift.records.batch import Logged
from offdrift.records.recorder import _close_all
from tests.command import command
from tests.records.samples import read_all, same_groups, unscored

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")

# Four responses after prompts of one token, in five columns: one with a tool's token inside, one whole,
# one without a token that trains, one that ends early.
MASK = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
LENGTHS, TRAINS = [4, 5, 0, 2], [3, 5, 0, 2]
POSITION = [0, 2, 3, 0, 1, 2, 3, 4, 0, 1]
LOGP = -torch.arange(20.0).view(4, 5) / 8
KEPT = LOGP[MASK.bool()]
BY_ROW = {
    "rewards": [1.0, 0.0, NAN, 0.5],
    "group_ids": [4, 4, 9, 9],
    "old_status": torch.tensor([0, 1, 2, 3]),
    "truncated": torch.tensor([0, 1, 0, 0]),
    "workers": ["node-1/0", "node-1/1", "node-1/0", ""],
    "queue_seconds": [0.25, 0.0, NAN, 4.0],
    "generation_seconds": torch.tensor([2.0, 8.5, 0.5, NAN]),
    "drawn_by": ["vllm", "", "vllm", "sglang"],
    "mix_alpha": [0.5, 0.0, NAN, 1.0],
    "prompts": ["a", "a", "b", "b"],
    "completions": ("w", "x", "", "z <b>"),
}


def recorded(folder: Path, **fields: Any) -> tuple[Logged, list[object]]:
    """What an audit reads of one call, every row usable; and what it could not read."""
    offdrift.record(folder, **{"step": 1, **fields}).close()
    _, batches, bad = read_all(folder)
    assert len(batches) == 1
    return batches[0], list(bad)


def test_padded_values_come_back_without_what_is_masked(tmp_path: Path) -> None:
    hole = torch.where(MASK.bool(), LOGP, NAN)  # what is masked may be anything
    back, bad = recorded(
        tmp_path, step=7, logp_rollout=hole - 1, logp=hole.bfloat16(), mask=MASK,
        tokens=torch.arange(20).view(4, 5), advantages=torch.tensor([0.5, -0.5, 9.0, 1.0]), version=6,
        rollout_version=torch.tensor([[5], [4], [3], [2]]), divergences={"kl_rollout_current": hole + 3},
        **BY_ROW,
    )  # fmt: skip
    assert bad == []
    assert back.cu_seqlens.diff().tolist() == TRAINS
    assert back.response_lengths.tolist() == LENGTHS
    assert back.in_response.tolist() == POSITION
    assert torch.equal(back.logp_rollout, KEPT - 1)
    assert torch.equal(back.logp, KEPT.bfloat16().float())
    assert torch.equal(back.divergences["kl_rollout_current"], KEPT + 3)
    assert back.tokens.tolist() == torch.arange(20)[MASK.flatten().bool()].tolist()
    assert back.advantages.tolist() == [0.5] * 3 + [-0.5] * 5 + [1.0] * 2
    assert back.rollout_version.tolist() == [5] * 3 + [4] * 5 + [2] * 2
    assert (back.step.tolist(), back.version.tolist()) == ([7] * 4, [6] * 4)
    assert str(back.rewards.tolist()) == str(BY_ROW["rewards"])
    assert same_groups(back.group_ids, torch.tensor([4, 4, 9, 9]))
    assert back.truncated.tolist() == [0, 1, 0, 0]
    assert back.workers == tuple(BY_ROW["workers"])
    assert str(back.queue_seconds.tolist()) == str(BY_ROW["queue_seconds"])
    assert str(back.generation_seconds.tolist()) == str(BY_ROW["generation_seconds"].tolist())
    assert (back.prompts, back.completions) == (tuple(BY_ROW["prompts"]), BY_ROW["completions"])
    assert back.unscored == {}


def test_packed_values_are_the_padded_ones(tmp_path: Path) -> None:
    padded, _ = recorded(tmp_path / "padded", logp=LOGP, mask=MASK, **BY_ROW)
    # With prompts and tool output in the stream, and a mask; and without either.
    whole, _ = recorded(
        tmp_path / "whole", logp=LOGP.flatten(), cu_seqlens=torch.arange(0, 21, 5).int(),
        mask=MASK.flatten().bool(), **BY_ROW,
    )  # fmt: skip
    thin, _ = recorded(tmp_path / "thin", logp=KEPT.numpy(), cu_seqlens=[0, 3, 8, 8, 10], **BY_ROW)
    for other in (whole, thin):
        assert torch.equal(other.cu_seqlens, padded.cu_seqlens)
        assert torch.equal(other.logp, KEPT)
        assert other.completions == padded.completions
    assert torch.equal(whole.in_response, padded.in_response)
    assert torch.equal(whole.response_lengths, padded.response_lengths)
    # Nobody said that tokens are missing.
    assert thin.position is None
    assert thin.response_lengths.tolist() == TRAINS


def test_what_is_no_number_is_left_out_and_counted_by_the_reader(tmp_path: Path) -> None:
    logp, advantages = LOGP - 0.5, torch.ones(4, 5)
    logp[0, 1], logp[1, 0], advantages[3, 2] = NAN, -INF, INF
    offdrift.record(tmp_path, step=1, logp_rollout=LOGP - 1, logp=logp, advantages=advantages, mask=MASK).close()
    _, (back, without), bad = read_all(tmp_path)
    assert bad == []
    assert unscored(back) == {"logp/missing": 1, "logp/infinite": 1}
    assert (back.row.tolist(), without.row.tolist()) == ([1, 2, 3], [4])
    assert back.in_response.tolist() == [2, 3, 1, 2, 3, 4]
    assert back.response_lengths.tolist() == LENGTHS[:3]
    # One advantage is not finite: its response has none, and keeps both of its tokens.
    assert without.advantages is None
    assert without.logp.tolist() == (LOGP - 0.5)[3, 1:3].tolist()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("step", 1.5, "1.5"), ("group_ids", [0.0, 0.25], "0.25"), ("version", float("nan"), "nan"),
        ("tokens", [[1.0, 2.5], [3.0, 0.0]], "2.5"), ("rollout_version", [1.0, float("inf")], "inf"),
    ],
)  # fmt: skip
def test_what_is_counted_must_be_whole(tmp_path: Path, name: str, value: Any, said: str) -> None:
    logp, mask = [[-1.0, -2.0], [-0.5, 0.0]], [[1, 1], [1, 0]]
    with offdrift.Recorder(tmp_path) as recorder:
        offdrift.record(recorder, **{"step": 1, "logp": logp, "mask": mask, name: value})
        with pytest.raises(RecordError, match=rf"{name} holds {said}; give whole numbers"):
            recorder.flush()
        # What is whole may be stored as a float; what is masked does not matter.
        offdrift.record(recorder, step=2.0, logp=logp, mask=mask, tokens=[[1.0, 2.0], [3.0, float("nan")]])
    _, (batch,), bad = read_all(tmp_path)
    assert not bad
    assert batch.step.tolist() == [2, 2]
    assert batch.tokens.tolist() == [1, 2, 3]


def test_stated_lengths_and_text_groups(tmp_path: Path) -> None:
    back, _ = recorded(
        tmp_path, logp=LOGP, mask=MASK, response_lengths=[4, 5, 8, 5], group_ids=["u", "v", "u", "v"]
    )  # fmt: skip
    assert back.response_lengths.tolist() == [4, 5, 8, 5]
    assert same_groups(back.group_ids, torch.tensor([0, 1, 0, 1]))


def test_a_shape_that_fits_both_ways_is_per_token(tmp_path: Path) -> None:
    back, _ = recorded(tmp_path, logp=[-1.0, -2.0], cu_seqlens=[0, 0, 2], advantages=[3.0, 4.0])
    assert back.advantages.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logp": LOGP}, "needs mask="),
        ({"logp": LOGP.flatten()}, r"logp has shape \(20,\): give padded"),
        ({"logp": LOGP, "mask": MASK, "cu_seqlens": [0, 20]}, "give padded"),
        ({"logp": LOGP, "logp_old": LOGP[:, 1:], "mask": MASK}, r"logp has shape \(4, 5\), expected \(4, 4\)"),
        ({"logp": LOGP, "mask": MASK, "rewards": torch.zeros(3)}, r"rewards has shape \(3,\), expected \(4,\)"),
        ({"logp": LOGP, "mask": MASK, "prompts": ["a"]}, "prompts has 1 texts for 4 sequences"),
        ({"logp": LOGP, "mask": MASK, "divergences": {"kl_rollout_old": KEPT}}, "kl_rollout_old has shape"),
        ({"rewards": [1.0]}, "at least one of logp_rollout"),
    ],
)  # fmt: skip
def test_shapes_that_contradict_each_other_are_named_at_the_call(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ShapeError, match=said):
        offdrift.record(tmp_path, step=1, **fields)


@pytest.mark.parametrize("cuts", [[0, 5, 9], [1, 5, 20], [0, 15, 20, 10, 20]])
def test_cuts_that_are_wrong_are_found_before_anything_is_written(tmp_path: Path, cuts: list[int]) -> None:
    recorder = offdrift.record(tmp_path, step=1, logp=LOGP.flatten(), cu_seqlens=cuts)
    with pytest.raises(RecordError, match="cu_seqlens"):
        recorder.flush()
    assert list(tmp_path.iterdir()) == []
    recorder.close()


def test_a_folder_has_one_recorder_until_it_is_closed(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"logp": np.array([[-1.0]]), "mask": [[1]]}
    first = offdrift.record(str(tmp_path), step=1, **fields)
    assert offdrift.record(tmp_path / ".", step=2, **fields) is first
    first.close()
    again = offdrift.record(tmp_path, step=2, **fields)
    assert again is not first
    again.close()
    _, batches, _ = read_all(tmp_path)
    assert sorted(s for b in batches for s in b.step.tolist()) == [1, 2, 2]


def test_importing_the_library_loads_no_arrow_and_asking_for_the_recorder_does(tmp_path: Path) -> None:
    # Also what the checks of the tests would refuse, and nobody else's: a chat instead of a text.
    program = """
import sys, offdrift
print("pyarrow" in sys.modules, offdrift.record.__module__, offdrift.Recorder.__module__, "pyarrow" in sys.modules)
try:
    offdrift.recorder_of
except AttributeError as e:
    print(e)
try:
    offdrift.record("log", step=1, logp=[[-1.0]] * 2, mask=[[1]] * 2, prompts=["a", [{"role": "user"}]])
except offdrift.OffdriftError as e:
    print(e)
for name in [m for m in sys.modules if m.startswith(("pyarrow", "offdrift.records"))]:
    del sys.modules[name]
del offdrift.Recorder  # kept since it was first asked for
sys.modules["pyarrow"] = None  # as if it were not installed
try:
    offdrift.Recorder
except ImportError as e:
    print(e)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "False offdrift.records.recorder offdrift.records.recorder True",
        "module 'offdrift' has no attribute 'recorder_of'",
        "prompts[1] is of type list; give one text per sequence, such as the rendered chat template",
        "offdrift.Recorder needs pyarrow: pip install 'offdrift[audit]'",
    ]
    assert list(tmp_path.iterdir()) == []


# -- what a person sees ------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "integrations" / "custom.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_the_loop_of_the_page_runs_and_the_command_below_it_audits_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short, loop, tracker, settings = BLOCKS
    names: dict[str, Any] = {}
    exec(loop, names)
    _close_all()  # as at the end of the process
    (line,) = re.findall(r"^offdrift (audit .*)$", PAGE, flags=re.M)
    done = command(monkeypatch, capsys, *line.split(), "--json")
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["counts"]["sequences"] == 12 * 32
    assert told["counts"]["tokens"] == 12 * 32 * 10
    # The short form, with the names that it takes from a loop.
    names["logp_old"] = names["logp_rollout"]
    names["group_ids"] = names["prompt"]
    names["mask"] = torch.ones_like(names["logp"])
    monkeypatch.chdir(tmp_path / "run")
    exec(short, names)
    _close_all()
    assert len(list(Path("run/log").iterdir())) == 1
    exec(settings, {})
    assert capsys.readouterr().out == "1 0\n"
    exec(tracker, {})
    rows = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [step for step, _ in rows] == ["1", "2", "3"]
    assert all(
        json.loads(row.replace("'", '"')).keys() == {"offdrift/full/k3", "offdrift/full/ess_frac"} for _, row in rows
    )
