"""The way over from 0.1 to 0.2 that the changelog shows is there: a check for every row of its table."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import offdrift as od
from offdrift.audit import stream
from offdrift.audit.partial import Job
from offdrift.engines.server.client import Server
from offdrift.engines.verify_sync import SyncReport
from offdrift.errors import EngineError, RecipeError
from offdrift.judge import load_rules
from offdrift.methods import METHODS
from offdrift.methods.describe import facts
from offdrift.records.readers import detect
from offdrift.records.rollouts import Retention
from offdrift.setting import parse_settings
from offdrift_lab.train.sweep import sweep, sweep_workers
from offdrift_lab.train.sweep.sweep import stored_sweep

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def rows() -> dict[str, str]:
    """The table of what to do, by what a user has."""
    table = CHANGELOG[CHANGELOG.index("### Breaking") : CHANGELOG.index("### Added")]
    return dict(re.findall(r"^\| (?!you have|---)(.+?) \| (.+) \|$", table, re.M))


def sweep_of_01(folder: Path) -> None:
    (folder / "sweep.json").write_text(json.dumps({"format": 1, "name": "old"}))
    with pytest.raises(RecipeError, match=r"version 0\.1 do not; use .offdrift sweep FILE --report --out "):
        stored_sweep(folder)


def run_sweep(folder: Path) -> None:
    assert callable(sweep_workers.run_sweep)
    assert not hasattr(sweep, "run_sweep")


def another_machine(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"use https://, tunnel to 127\.0\.0\.1, .*rollout\.insecure = true"):
        Server("http://other-machine/v1")
    Server("http://other-machine/v1", insecure=True).close()
    Server("https://other-machine/v1").close()


def policy_loss(folder: Path) -> None:
    lp = od.LogProbs.pack(torch.full((1, 2), -1.0), torch.full((1, 2), -1.1), mask=torch.ones(1, 2))
    result = od.policy_loss(lp, od.method("none"), torch.ones(2))
    again = od.PolicyLoss(result.loss, result.corrected, result.observed, summarize=lambda: result.stats)
    assert again.stats is result.stats
    with pytest.raises(TypeError):
        od.PolicyLoss(result.loss, result.corrected, stats=result.stats, observed=result.observed)  # type: ignore[call-arg]


def kept_scores(folder: Path) -> None:
    from offdrift.divergence import hidden

    assert inspect.signature(od.hidden_divergences).parameters["keep_mib"].default is None
    assert (hidden.KEEP_MIB["cpu"], hidden.KEEP_MIB_ELSEWHERE) == (256, 1024)


def no_plotly(folder: Path) -> None:
    assert "plotly" not in (ROOT / "pyproject.toml").read_text("utf-8")
    assert [*(ROOT / "src/offdrift/show/assets").glob("plotly*")]


def parts_of_an_audit(folder: Path) -> None:
    file = folder / "log.jsonl"
    file.write_text('{"rollout_log_probs": [-1.0], "old_log_probs": [-1.1]}\n')
    job = Job(detect([str(file)]))
    piece = stream.Piece(str(file), 0, 1, "jsonl")
    with pytest.MonkeyPatch.context() as patch:
        ours = stream._key(piece, job)
        patch.setattr(stream, "version", lambda name: "0.1.0")
        assert stream._key(piece, job) != ours


def held_by(file: str, name: str) -> Callable[[Path], None]:
    """A row that a test elsewhere holds."""

    def check(folder: Path) -> None:
        tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    return check


def moved_rule(folder: Path) -> None:
    rules = load_rules().rules
    assert "engines_far_apart" in rules
    assert "wrong_weights_from_the_start" not in rules


def sync_report(folder: Path) -> None:
    fields = {field.name for field in dataclasses.fields(SyncReport)}
    assert {"stale", "together", "unverified"} <= fields
    assert hasattr(SyncReport, "proved") or "proved" in fields
    assert "groups" not in fields


def parsed(folder: Path) -> None:
    assert parse_settings("gate.high=0.5") == {"gate.high": 0.5}


def trained_return(folder: Path) -> None:
    assert facts("grpo", METHODS["grpo"])["trained_return"]["words"]
    assert "visible_until" in {field.name for field in dataclasses.fields(Retention)}


CHECKS: dict[str, Callable[[Path], None]] = {
    "`coverage.said` of `audit.json`": held_by("audit/test_stream.py", "test_the_stored_audit_comes_back"),
    "`raises` in `offdrift methods --json`": trained_return,
    "`from offdrift.train...`": held_by("test_moved.py", "test_an_old_name_is_the_same_module_and_warns"),
    "`from offdrift.adapters.base import settings_of`": parsed,
    "`SyncReport.groups`": sync_report,
    "a `--rules` file": moved_rule,
    "an arm's table": held_by(
        "../tests_lab/train/settings/test_arm_tables.py", "test_an_arm_changes_the_keys_that_it_names"
    ),
    "`offdrift certify` on prompts": held_by(
        "prove/test_certify.py", "test_prompts_that_recur_over_files_are_no_fresh_draws"
    ),
    "a folder of a sweep from 0.1": sweep_of_01,
    "`from offdrift.train.sweep import run_sweep`": run_sweep,
    "a training loop that counted on SIGTERM": held_by(
        "records/test_recorder.py", "test_sigterm_writes_what_waits_and_then_ends_the_process"
    ),
    "`offdrift audit --ray`": held_by(
        "engines/test_local_ray.py",
        "test_every_server_of_a_local_ray_listens_on_loopback_and_workers_are_as_nice_as_the_trainer",
    ),
    '`rollout.url = "http://OTHER-MACHINE/v1"`': another_machine,
    "`PolicyLoss(loss, corrected, stats, observed)`": policy_loss,
    "`hidden_divergences`": kept_scores,
    "`offdrift train RECIPE --resume`": held_by(
        "../tests_lab/train/loop/test_run_folder.py", "test_of_several_unfinished_runs_none_is_guessed"
    ),
    "a program that has plotly": no_plotly,
    "`offdrift audit 'https://USER:PASSWORD@HOST/...'`": held_by(
        "fuzz/test_secrets.py", "test_a_log_at_an_address_with_a_secret_is_refused_without_it"
    ),
    "a server whose whole answer takes longer": held_by(
        "fuzz/test_server.py", "test_an_engine_whose_server_trickles_gives_up"
    ),
    "a chart of one of the 119": held_by(
        "adapters/test_selection.py", "test_hooks_read_the_environment_and_send_the_choice_to_other_processes"
    ),
    "a chart of the metric `batch`": held_by(
        "foreign/test_trackers.py", "test_three_arms_are_three_runs_that_have_ended"
    ),
    "`offdrift_lab.evidence.budget.LIMITS`": held_by(
        "../tests_lab/evidence/test_budget.py", "test_the_budget_is_that_of_the_rules"
    ),
    'the note "accepted': held_by(
        "../tests_lab/train/report/test_summary.py",
        "test_the_note_on_few_sequences_is_that_of_the_rules_it_is_shown_by",
    ),
    "`watch --fail-on`, an alarm or `stop_on`": held_by(
        "judge/test_track_record.py", "test_a_run_that_goes_on_is_told_at_the_live_level"
    ),
    "parts of an unfinished audit from 0.1": parts_of_an_audit,
}


@pytest.mark.parametrize("row", CHECKS)
def test_what_the_changelog_tells_users_to_do_is_there(row: str, tmp_path: Path) -> None:
    assert [start for start in rows() if start.startswith(row)], f"CHANGELOG.md has no row {row}"
    CHECKS[row](tmp_path)


def test_every_row_is_checked() -> None:
    assert [row for row in rows() if not row.startswith((*CHECKS,))] == []
    assert len(rows()) >= 10
