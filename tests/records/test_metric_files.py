"""Metrics of other programs: every container gives the same rows, and what is damaged is named."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch

from offdrift.errors import RecordError
from offdrift.judge import diagnose, watcher
from offdrift.judge import metric_names as table
from offdrift.judge.metric_names import metric_names
from offdrift.logprobs import LogProbs
from offdrift.records.readers.metrics import find_metrics
from offdrift.records.readers.metrics.event_files import masked_crc
from offdrift.records.readers.recognize import recognize
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize
from offdrift.stats.metrics import METRICS
from tests.records.metric_files import STEPS, VERL, WRITERS, wandb_file, wandb_record, write_events, write_lines

OURS = {
    "rollout_corr/kl": "mismatch/k1",
    "rollout_corr/k3_kl": "mismatch/k3",
    "actor/grad_norm": "optim/grad_norm",
    "critic/score/mean": "reward/mean",
}


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_container_gives_the_same_rows(tmp_path: Path, name: str, as_folder: bool) -> None:
    file = WRITERS[name](tmp_path)
    log = find_metrics([str(tmp_path if as_folder else file)])
    assert log is not None
    assert (log.framework, log.bad, log.names) == ("verl", (), {ours: theirs for theirs, ours in OURS.items()})
    assert log.unused == ("timing_s/gen",)
    assert [row["step"] for row in log.rows] == list(range(STEPS))
    for row, logged in zip(log.rows, VERL, strict=True):
        for theirs, ours in OURS.items():
            wanted = logged[theirs]
            if name == "verl's file logger" and math.isnan(wanted):  # orjson writes null
                assert ours not in row
            else:
                assert row[ours] == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def test_the_state_of_a_transformers_trainer_is_read_from_its_last_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    history = [{"step": i, "reward": 0.1 * i, "kl": 3.0, "entropy": 2.0, "learning_rate": 1e-6} for i in range(1, 9)]
    for steps in (4, 8):
        folder = tmp_path / f"checkpoint-{steps}"
        folder.mkdir()
        evaluation = {"step": steps, "eval_reward": 0.9}
        state = transformers.TrainerState(log_history=[*history[:steps], evaluation])
        state.save_to_json(str(folder / "trainer_state.json"))
    log = find_metrics([str(tmp_path)])
    assert log is not None
    assert (log.framework, log.container, len(log.rows)) == ("trl", "trainer_state.json", 8)
    assert log.rows[-1] == pytest.approx(
        {"step": 8, "reward/mean": 0.8, "current/entropy": 2.0, "optim/lr": 1e-6}
    )  # the KL is to the reference policy, and the evaluation is none of the training's rewards


def test_rows_of_one_step_are_joined_and_the_last_value_counts(tmp_path):
    rows = [
        {"step": 1, "optim/lr": 1e-6},
        {"step": 1, "mismatch_kl/all/mean": 0.5},
        {"step": 1, "mismatch_kl/all/mean": 0.25, "off_policy/max": 2.0},
        {"step": 0, "mismatch_kl/all/mean": 0.1},
    ]
    log = find_metrics([str(write_lines(tmp_path, rows))])
    assert log is not None
    assert log.framework == "prime-rl"
    assert list(log.rows) == [
        {"step": 0, "full/k3": 0.1},
        {"step": 1, "optim/lr": 1e-6, "full/k3": 0.25, "version_lag/max": 2.0},
    ]


def test_an_exported_chart_of_wandb_is_read_without_its_extremes(tmp_path):
    file = tmp_path / "wandb_export.csv"
    name = "fancy-run - 1 - train/train_rollout_logprob_abs_diff"
    file.write_text(f'"Step","{name}","{name}__MIN","{name}__MAX"\n"1","0.5","0.1","0.9"\n"2","","",""\n')
    log = find_metrics([str(file)])
    assert log is not None
    assert (log.framework, list(log.rows)) == ("slime", [{"step": 1, "mismatch/abs_log_ratio_mean": 0.5}])
    file.write_text('"Step","a - actor/ppo_kl","b - actor/ppo_kl"\n1,2,3\n')
    with pytest.raises(RecordError, match=r"wandb_export.csv holds the metrics of 2 runs \(a, b\)"):
        find_metrics([str(file)])


def test_several_runs_of_a_folder_are_named_and_none_is_chosen(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name)
    with pytest.raises(RecordError, match="metrics of 2 runs"):
        find_metrics([str(tmp_path)])
    assert find_metrics([str(tmp_path / "a")]) is not None


def test_a_log_of_tokens_comes_before_metrics(tmp_path):
    write_lines(tmp_path)
    assert recognize([str(tmp_path)]) == find_metrics([str(tmp_path)])
    (tmp_path / "log.jsonl").write_text('{"step": 1, "logp_rollout": [-1.0], "logp": [-1.5]}\n')
    assert recognize([str(tmp_path)]).files == (str(tmp_path / "log.jsonl"),)


def test_what_is_no_metric_is_left_to_the_error_of_a_log(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"step": 1, "colour": 2}\n')
    assert find_metrics([str(file)]) is None
    with pytest.raises(RecordError, match="--columns"):
        recognize([str(file)])
    file.write_text('{"actor/ppo_kl": 2}\n')  # no step: it may be anything
    assert find_metrics([str(file)]) is None


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 5, "actor/ppo_kl": 1e', "not JSON"),
        ("[1, 2]", "a JSON list"),
        ('{"step": -1, "actor/ppo_kl": 1}', "no step"),
        ('{"step": 1.5, "actor/ppo_kl": 1}', "no step"),
        ('{"step": 1e300, "actor/ppo_kl": 1}', "no step"),
        ('{"step": 5, "actor/ppo_kl": [1]}', "no number"),
        ('{"step": 5, "actor/ppo_kl": "many"}', "no number"),
        ('{"step": 5, "actor/ppo_kl": true}', "no number"),
        ('{"step": 5, "actor/ppo_kl": 1' + "0" * 400 + "}", "no number"),
        ('{"step": 5, "actor/ppo_kl": 1' + "0" * 9000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path, line, reason):
    file = write_lines(tmp_path)
    file.write_text(file.read_text() + line + "\n" + json.dumps({"step": 99, "actor/ppo_kl": 1.0}) + "\n")
    log = find_metrics([str(file)])
    assert log is not None
    assert [row["step"] for row in log.rows] == [*range(STEPS), 99]
    ((bad),) = log.bad
    assert (bad.file, bad.row) == (str(file), STEPS + 1)
    assert reason in bad.reason


@pytest.mark.parametrize("name", ["TensorBoard", "W&B run"])
def test_a_file_that_is_cut_off_gives_its_beginning(tmp_path, name):
    file = WRITERS[name](tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - 30])
    log = find_metrics([str(file)])
    assert log is not None
    assert len(log.rows) in (STEPS - 1, STEPS)
    assert [(b.rows, "cut off" in b.reason) for b in log.bad] == [(0, True)]


@pytest.mark.parametrize("name", ["TensorBoard", "W&B run"])
def test_garbage_by_the_name_of_a_tracker_is_one_message_with_the_file(tmp_path, name):
    file = WRITERS[name](tmp_path)
    file.write_bytes(b"\x93" * 500)
    with pytest.raises(RecordError) as error:
        recognize([str(tmp_path)])
    assert file.name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flipped_bit_of_an_event_is_found_by_its_checksum(tmp_path):
    file = write_events(tmp_path)
    content = bytearray(file.read_bytes())
    place = content.index(b"rollout_corr/k3_kl", len(content) // 2)
    content[place] ^= 1
    file.write_bytes(content)
    log = find_metrics([str(file)])
    assert log is not None
    assert ["checksum" in bad.reason for bad in log.bad] == [True]
    assert len(log.rows) == STEPS
    assert sum("mismatch/k3" not in row for row in log.rows) == 1


@pytest.mark.parametrize("length", [2**20 + 1, 2**62, 2**64 - 1])
def test_an_event_that_claims_to_be_huge_takes_no_memory(tmp_path, length):
    file = write_events(tmp_path)
    header = struct.pack("<Q", length)
    file.write_bytes(file.read_bytes() + header + struct.pack("<I", masked_crc(header)) + b"x")
    log = find_metrics([str(file)])
    assert log is not None
    assert len(log.rows) == STEPS
    assert ["cut off" in bad.reason for bad in log.bad] == [True]


@pytest.mark.parametrize("inner", [b"\x12\xff\xff\xff\x7f", b"\x12\x05a", b"\x13", b"\x80" * 11, b"\xff" * 9 + b"\x01"])
def test_a_message_that_reaches_beyond_itself_is_bad_and_the_next_is_read(tmp_path, inner):
    file = tmp_path / "run-x.wandb"
    file.write_bytes(wandb_file([wandb_record(VERL[0]), inner, wandb_record(VERL[1])]))
    log = find_metrics([str(file)])
    assert log is not None
    assert [row["step"] for row in log.rows] == [0, 1]
    assert len(log.bad) == 1


def test_trainer_state_that_is_cut_off_is_one_message_with_the_file(tmp_path):
    file = tmp_path / "trainer_state.json"
    file.write_text('{"log_history": [{"step": 1, "rew')
    with pytest.raises(RecordError, match=r"trainer_state.json is not JSON .*cut off or damaged"):
        recognize([str(tmp_path)])


def test_json_lines_in_a_file_that_is_named_json_are_read(tmp_path):
    file = tmp_path / "metrics.json"
    write_lines(tmp_path).rename(file)
    log = find_metrics([str(file)])
    assert log is not None
    assert (log.framework, len(log.rows), log.bad) == ("verl", STEPS, ())


@pytest.mark.parametrize(("other", "framework"), [("rollout/kl", "plain"), ("completions/mean_length", "trl")])
def test_names_that_every_trainer_uses_tell_no_framework(tmp_path, other, framework):
    file = tmp_path / "metrics.csv"
    file.write_text(f"step,{other},loss\n1,0.01,0.5\n2,0.02,0.4\n")
    log = find_metrics([str(file)])
    assert log is not None
    assert (log.framework, log.names["optim/loss"]) == (framework, "loss")
    if framework == "plain":
        assert log.description.endswith(f"not used: {other}")


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 10**300, -5.0, 5e-324])
def test_numbers_beyond_all_bounds_are_judged_without_an_overflow(tmp_path, value):
    names = [entry.theirs for entry in metric_names().names if entry.framework == "verl"]
    rows = [{"step": i, **dict.fromkeys(names, value * (-1) ** i)} for i in range(120)]
    log = find_metrics([str(write_lines(tmp_path, rows))])
    assert log is not None
    assert len(log.rows) == 120
    diagnose(log.rows)
    diagnose(rows)


def test_a_value_that_no_metric_of_its_name_has_is_left_out_and_named(tmp_path):
    rows = [{"step": 1, "rollout_corr/k3_kl": -0.5, "actor/pg_clipfrac": 1.5, "rollout_corr/kl": -0.5}]
    log = find_metrics([str(write_lines(tmp_path, rows))])
    assert log is not None
    assert list(log.rows) == [{"step": 1, "mismatch/k1": -0.5}]
    assert sorted(bad.reason[:17] for bad in log.bad) == ["actor/pg_clipfrac", "rollout_corr/k3_k"]


# -- the table ----------------------------------------------------------------------------------------


def test_no_name_means_two_things():
    table = metric_names()
    for entry in table.names:
        others = {e.ours for e in table.find(entry.theirs)}
        assert others == {entry.ours}, entry.theirs
        assert entry.ours in METRICS or entry.ours.startswith("optim/"), entry.ours
        assert entry.ours == entry.theirs or entry.theirs not in METRICS, entry.theirs


@pytest.mark.parametrize(
    ("package", "framework", "folders"),
    [("verl", "verl", ("trainer", "utils", "workers")), ("trl", "trl", ("trainer", "experimental/async_grpo"))],
)
def test_the_names_stand_in_the_installed_framework(package, framework, folders):
    root = Path(pytest.importorskip(package).__file__).parent
    source = "\n".join(f.read_text(errors="replace") for x in folders for f in sorted((root / x).rglob("*.py")))
    of_transformers = {"loss", "grad_norm", "learning_rate"}
    for entry in metric_names().names:
        if entry.framework == framework and entry.theirs not in of_transformers and "train/" not in entry.theirs:
            last = entry.theirs.rpartition("/")[2]
            assert any(f'{name}"' in source for name in (entry.theirs, last)), entry.theirs


def test_diagnose_takes_the_names_of_frameworks():
    ours = [{"step": i, "full/k3": 0.4, "version_lag/mean": 4.0} for i in range(1, 9)]
    theirs = [{"step": i, "mismatch_kl/all/mean": 0.4, "off_policy/mean": 4.0} for i in range(1, 9)]
    assert [f.rule for f in diagnose(theirs)] == [f.rule for f in diagnose(ours)] != []
    # What has our name already keeps its value.
    both = [{**a, "mismatch_kl/all/mean": 0.0} for a in ours]
    assert diagnose(both) == diagnose(ours)


def test_names_of_ms_swift_and_of_tinkers_cookbook_say_the_formulas_that_they_are():
    """On the log-ratios of three tokens, by the lines that write them."""
    log_ratio = torch.tensor([0.1, -0.4, 0.2], dtype=torch.float64)  # trainer less engine
    k1, k2, k3 = -log_ratio.mean(), (log_ratio**2).mean() / 2, (log_ratio.exp() - 1 - log_ratio).mean()
    swift = {"rollout_correction/kl": k1, "train/rollout_correction/k3_kl": k3}
    cookbook = {"optim/kl_sample_train_v1": (-log_ratio).mean(), "optim/kl_sample_train_v2": k2}
    lp = LogProbs.pack(torch.full((3,), -1.0), -1.0 + log_ratio, segments=Segments.from_lengths([3]))
    ours = summarize(DriftStats.of(lp))
    read = metric_names().translate({**swift, **cookbook, "async/staleness_max": 3})
    assert read["mismatch/k1"] == read["full/k1"] == pytest.approx(ours["full/k1"])
    assert read["full/k2"] == pytest.approx(ours["full/k2"])
    assert read["mismatch/k3"] == pytest.approx(ours["full/k3"])
    assert read["version_lag/max"] == 3


def test_a_kl_means_what_stands_beside_it():
    table = metric_names()
    assert table.translate({"kl": 0.5}) == {"kl": 0.5}
    assert table.translate({"kl": 0.5, "sample/staleness_mean": 1.0})["full/k3"] == 0.5
    assert table.translate({"train/kl": 0.5, "train/sample/staleness_mean": 1.0})["full/k3"] == 0.5


def test_rows_that_skip_the_frameworks_table_hold_no_name_of_it():
    assert not [name for name in watcher.OURS if metric_names().find(name)]
    assert not watcher.OURS & {*metric_names().steps, *table.STEPS} - {"step"}


@pytest.mark.parametrize("reward", [True, False])
def test_tokens_under_unknown_names_are_no_metrics_though_there_is_a_reward(tmp_path, reward):
    rows = [{"step": i, "mu": [-0.5] * (3 + i), "pi": [-0.25] * (3 + i), "reward": 0.5} for i in range(4)]
    rows = rows if reward else [{k: x for k, x in row.items() if k != "reward"} for row in rows]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = r"mu, pi may be log-probs of tokens; say whose, such as --columns logp_rollout=mu,logp_old=pi if the engine"
    with pytest.raises(RecordError, match=said):
        recognize([str(file)])
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": i, "reward": 0.25} for i in (1, 2)]})
    )
    assert recognize([str(tmp_path)]).rows[0]["reward/mean"] == 0.25  # the run's own metrics, where it has some


def test_quantiles_beside_metrics_are_no_tokens(tmp_path):
    rows = [
        {"step": i, "reward": 0.5, "loss": -0.1, "quantiles": [-3.0, -2.0, -0.5], "bins": [-1, 0]} for i in range(4)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recognize([str(file)]).names["reward/mean"] == "reward"
