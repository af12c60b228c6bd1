"""A run as it is read, unfinished, resumed, cut off or damaged; its table's cells and verdict by hand."""

import json
import re
from pathlib import Path

import pytest

from offdrift.errors import RecordError
from offdrift.show.numbers import duration, fixed, percent, short
from offdrift_lab.train.report.stored import COLUMNS, Run, StoredArm, read_run, verdict
from tests.show.synthetic import ARMS, write_lines, write_run


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A run that has only just begun: no arm yet."""
    (tmp_path / "run.json").write_text('{"format": 1, "name": "bare"}', encoding="utf-8")
    return tmp_path


def test_a_finished_run_is_read_in_the_order_of_its_table(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, updates=64))
    assert [arm.name for arm in run.arms] == list(ARMS)
    assert [len(arm.metrics) for arm in run.arms] == [64] * 4
    assert [len(arm.evals) for arm in run.arms] == [5] * 4
    assert all(arm.finished and arm.updates == 64 and arm.samples for arm in run.arms)
    updates, rewards = run.arms[0].series("reward/mean")
    assert updates == list(range(64))
    lines = (tmp_path / "arms/none/metrics.jsonl").read_text().splitlines()
    stored = [json.loads(line) for line in lines]
    assert rewards == [row["reward/mean"] for row in stored]


def test_arms_of_a_running_run_come_in_the_order_of_its_recipe(bare: Path) -> None:
    head = {"format": 1, "recipe": {"arms": {"z": {}, "b": {}}}, "table": []}
    (bare / "run.json").write_text(json.dumps(head))
    for name in ("a", "b", "z"):
        write_lines(bare / f"arms/{name}/metrics.jsonl", [{"update": 1}])
    assert [arm.name for arm in read_run(bare).arms] == ["z", "b", "a"]


def test_a_half_written_last_line_is_ignored(bare: Path) -> None:
    path = bare / "arms/a/metrics.jsonl"
    write_lines(path, [{"update": 0, "reward/mean": 0.5}])
    with path.open("a") as file:
        file.write('{"update": 1, "rew')
    (arm,) = read_run(bare).arms
    assert arm.series("reward/mean") == ([0], [0.5])
    assert (arm.skipped_lines, arm.notes) == (0, ())


def test_an_unreadable_line_inside_a_file_is_skipped_and_told(bare: Path) -> None:
    path = bare / "arms/a/metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"update": 0, "x": 1}\n{"upd{"update": 1}\n[3]\n{"update": 2, "x": 3}\n')
    (arm,) = read_run(bare).arms
    assert arm.series("x") == ([0, 2], [1.0, 3.0])
    assert arm.skipped_lines == 2
    assert arm.notes == ("2 unreadable lines were skipped in its files",)


def test_a_text_with_a_line_separator_is_one_line(bare: Path) -> None:
    path = bare / "arms/a/samples.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    (arm,) = read_run(bare).arms
    assert [sample.prompt for sample in arm.samples] == ["a\u2028b\x85c"]


def test_of_an_update_written_twice_the_later_row_counts(bare: Path) -> None:
    rows = [{"update": u, "x": x} for u, x in [(0, 1), (1, 2), (2, 3), (1, 20), (2, 30)]]
    write_lines(bare / "arms/a/metrics.jsonl", rows)
    assert read_run(bare).arms[0].series("x") == ([0, 1, 2], [1.0, 20.0, 30.0])


def test_values_that_are_no_finite_number_are_absent(bare: Path) -> None:
    path = bare / "arms/a/metrics.jsonl"
    path.parent.mkdir(parents=True)
    values = ["null", "NaN", "Infinity", "-1e999", '"7"', "[1]", "1" + "0" * 400, "2.5"]
    path.write_text("".join(f'{{"update": {i}, "x": {v}}}\n' for i, v in enumerate(values)))
    (arm,) = read_run(bare).arms
    assert len(arm.metrics) == len(values)
    assert arm.series("x") == ([7], [2.5])


def test_rows_without_an_update_are_left_out(bare: Path) -> None:
    write_lines(bare / "arms/a/metrics.jsonl", [{"x": 1}, {"update": None, "x": 2}, {"update": 3, "x": 3}])
    assert read_run(bare).arms[0].series("x") == ([3], [3.0])


def test_a_running_arm_is_summed_up_from_its_metrics(bare: Path) -> None:
    rows = [
        {"update": 0, "divergence/kl_rollout_current_max": 0.2, "gate/acceptance_seq": 1.0, "certificate/falsified": 1},
        {
            "update": 1,
            "divergence/kl_rollout_current_max": 0.5,
            "gate/acceptance_seq": 0.5,
            "certificate/falsified": True,
        },
        {
            "update": 2,
            "divergence/kl_rollout_current_max": 0.1,
            "gate/acceptance_seq": None,
            "certificate/falsified": 0,
        },
    ]
    write_lines(bare / "arms/a/metrics.jsonl", rows)
    write_lines(bare / "arms/a/eval.jsonl", [{"update": 0, "reward": 0.1}, {"update": 2, "reward": 0.4}])
    (arm,) = read_run(bare).arms
    assert not arm.finished
    figures = ("kl_max", "acceptance", "falsified_updates", "reward_before", "reward_after", "ess_frac")
    assert [arm.figure(f) for f in figures] == [0.5, 0.75, 2.0, 0.1, 0.4, None]
    assert arm.updates == 2


def test_an_arm_that_only_the_table_knows_is_kept(bare: Path) -> None:
    head = {"format": 1, "table": [{"arm": "gone", "reward_after": 0.5}, {"method": "nameless"}, 3]}
    (bare / "run.json").write_text(json.dumps(head))
    (arm,) = read_run(bare).arms
    assert (arm.name, arm.finished, arm.figure("reward_after")) == ("gone", True, 0.5)


def test_per_token_lists_get_the_length_of_the_tokens(bare: Path) -> None:
    row = {"tokens": ["a", "b", "c"], "kl": [0.1], "tv": [0.1, None, 0.3, 0.4], "weight": "none", "new": 1}
    write_lines(bare / "arms/a/samples.jsonl", [row])
    (sample,) = read_run(bare).arms[0].samples
    assert sample.kl == (0.1, None, None)
    assert sample.tv == (0.1, None, 0.3)
    assert sample.weight == sample.logp_rollout == (None, None, None)
    assert (sample.kl_max, sample.accepted, sample.update) == (0.1, None, None)


def test_missing_and_mistyped_parts_of_the_head_are_absent(bare: Path) -> None:
    (bare / "run.json").write_text('{"format": 1, "recipe": 3, "seconds": "long", "versions": null}')
    run = read_run(bare)
    assert (run.name, run.recipe, run.seconds, run.versions, run.arms) == (bare.name, {}, None, {}, ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run.json"),
        ('{"format": 1, "na', "is not JSON"),
        ('{"format": 2}', "has format 2, this version reads format 1"),
        ("[]", "has format 'list'"),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_run(tmp_path)


def arm(
    name: str,
    after: float | None = None,
    *,
    before: float | None = None,
    acceptance: float | None = None,
    prompts: int | None = None,
    finished: bool = True,
) -> StoredArm:
    summary = {"reward_before": before, "reward_after": after, "acceptance": acceptance}
    evals = () if prompts is None else ({"update": 8, "reward": after, "prompts": prompts},)
    return StoredArm(name, finished, summary, evals=evals)


def sentence(*arms: StoredArm) -> str:
    return verdict(Run("run", {}, "", None, {}, {}, arms))


# Two means of 0.5 over 50 prompts each: sqrt(0.25 / 50 + 0.25 / 50) = 0.1, twice that is 0.2.
# 0.7 and 0.5 over 100: sqrt(0.21 / 100 + 0.25 / 100) = 0.067823, twice that is 0.136.
@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ((), "No arm"),
        ((arm("a"),), "No held-out reward"),
        ((arm("a", 0.5),), "a ended at 0.500"),
        ((arm("a", 0.5, before=0.25),), "from 0.250 to 0.500"),
        (
            (arm("a", 0.5), arm("b", 0.75), arm("c", 0.6), arm("d")),
            "b ended with the highest .* 0.750\\. That is 0.150 ahead of c\\.",
        ),
        ((arm("a", 0.5), arm("b", 0.5), arm("c", 0.25)), "a and b ended level, .* 0.500"),
        ((arm("a", 0.0), arm("b", 0.0), arm("c")), "a and b ended level, at 0.000"),
        ((arm("a", 0.7, prompts=100), arm("b", 0.5, prompts=100)), "0.700\\. That is 0.200 ahead of b\\."),
        (
            (arm("a", 0.6, prompts=100), arm("b", 0.5, prompts=100)),
            "0.100 ahead of b, .*noise of 100 .* errors: 0.140",
        ),
        ((arm("a", -3.0, prompts=100), arm("b", -4.0, prompts=100)), "−3.000\\. That is 1.000 ahead of b\\."),
        ((arm("a", 0.5, acceptance=0.7), arm("b", acceptance=0.6999)), "0.500 .*\\. b accepted 69.9 % .* 70 % "),
        (
            (arm("a", acceptance=0.5), arm("b", acceptance=0.25), arm("c", acceptance=0.0)),
            "No held-out reward .*\\. a accepted 50.0 %, b accepted 25.0 % and c accepted 0.0 % ",
        ),
        ((arm("a", 0.5), arm("b", finished=False)), "So far .b still running.: a ended at 0.500"),
        ((arm("a", finished=False), arm("b", finished=False)), "So far .a and b still running.: no held-out reward"),
    ],
)
def test_the_verdict_says_what_the_numbers_say(arms: tuple[StoredArm, ...], expected: str) -> None:
    assert re.search(expected, sentence(*arms))


def test_every_column_explains_itself() -> None:
    assert len(COLUMNS) == 9
    for column in COLUMNS:
        assert column.meaning.endswith("."), column.id
        assert column.better.split()[0] in {"higher", "lower", "watch:"}, column.id
    assert {c.unit for c in COLUMNS if c.id in {"kl_mean", "kl_max", "ppl_gap"}} == {"nat"}


def test_an_arm_without_numbers_has_a_dash_in_every_cell() -> None:
    cells = [column.cell(StoredArm("a", True)) for column in COLUMNS]
    assert [cell.text for cell in cells] == ["–"] * 9
    assert not any(cell.note or cell.flagged for cell in cells)


@pytest.mark.parametrize(
    ("column", "summary", "text", "note", "flagged"),
    [
        ("reward", {"reward_before": 0.25, "reward_after": 0.5}, "0.250 → 0.500", "change +0.250", False),
        ("reward", {"reward_before": 0.5, "reward_after": 0.25}, "0.500 → 0.250", "change −0.250", False),
        ("reward", {"reward_before": 0.5}, "0.500", "", False),
        ("kl_mean", {"kl_mean": 0.00123, "grade": "exact"}, "0.00123", "exact", False),
        ("kl_max", {"kl_max": 0.0000456}, "4.56e−5", "", False),
        ("acceptance", {"acceptance": 0.7}, "70.0 %", "", False),
        ("acceptance", {"acceptance": 0.69}, "69.0 %", "below 70 %", True),
        ("ess", {"ess_frac": 0.9}, "90.0 %", "", False),
        ("ppl_gap", {"log_ppl_gap": 0.0125}, "0.0125", "", False),
        ("bound", {"bound": 4.1}, "4.10", "", False),
        ("precondition", {"falsified_updates": 0, "updates": 64}, "yes", "in all 64 updates", False),
        ("precondition", {"falsified_updates": 3, "updates": 64}, "no", "in 3 of 64 updates", True),
        ("speed", {"tokens_per_s": 2413.4, "seconds": 78.5}, "2,413", "1 min 18 s", False),
    ],
)
def test_cells(column: str, summary: dict, text: str, note: str, flagged: bool) -> None:
    (cell,) = [c.cell(StoredArm("a", True, summary)) for c in COLUMNS if c.id == column]
    assert (cell.text, cell.note, cell.flagged) == (text, note, flagged)


def test_numbers_are_printed_for_people() -> None:
    assert [short(v) for v in (0.0, 1.0, 12345.0, 9999.0, 0.001, 0.00099, 100.0)] == [
        "0", "1.00", "1.23e4", "9999", "0.00100", "9.90e−4", "100",
    ]  # fmt: skip
    assert (fixed(1.23456), percent(0.99999), percent(0.7)) == ("1.235", "99.9 %", "70.0 %")
    assert [duration(v) for v in (0.4, 59.6, 3599.0, 3600.0)] == ["0.4 s", "1 min 0 s", "59 min 59 s", "1 h 0 min"]
