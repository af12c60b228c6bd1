"""What a person sees in a terminal: live numbers, the warning on low acceptance, the final table."""

import io
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offdrift_lab.train.report import view
from offdrift_lab.train.report.stored import read_run
from offdrift_lab.train.report.view import LIVE, LiveProgress, run_summary
from tests.show.screens import printed


@dataclass(frozen=True)
class Event:
    kind: str
    arm: str = ""
    step: int = 0
    total: int = 0
    text: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


UPDATE = {
    "update": 8, "reward/mean": 0.625, "divergence/kl_rollout_current_mean": 0.00123,
    "divergence/kl_rollout_current_max": 0.456, "gate/acceptance_seq": 0.5, "full/ess_frac": 0.91,
    "version_lag/max": 7.0, "throughput/tokens_per_s": 4321.0,
}  # fmt: skip


def shown(*events: Event, terminal: bool = False) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=140, force_terminal=terminal, color_system=None)
    with LiveProgress(console) as watch:
        for event in events:
            watch(event)
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_update_shows_every_live_number(terminal):
    text = shown(Event("arm", "trm_max", 0, 64, "rule"), Event("update", "trm_max", 8, 64, metrics=UPDATE), terminal=terminal)  # fmt: skip
    for number in ("0.625", "0.00123", "0.456", "50.0 %", "91.0 %", "4,321"):
        assert number in text, number
    assert len(LIVE) == 7
    assert "8/64" in text


def test_low_acceptance_is_called_out_once():
    events = [Event("update", "trm_max", i, 64, metrics=UPDATE) for i in (1, 2, 3)]
    text = shown(*events)
    assert text.count("less than 70 %") == 1
    fine = {**UPDATE, "gate/acceptance_seq": 0.7}
    assert "less than 70 %" not in shown(Event("update", "trm_max", 1, 64, metrics=fine))


def test_off_a_terminal_there_are_plain_lines_now_and_then():
    text = shown(*(Event("update", "a", i, 64, metrics={**UPDATE, "gate/acceptance_seq": 1.0}) for i in range(1, 25)))
    assert len(text.splitlines()) == 3
    assert "\x1b" not in text


def test_off_a_terminal_a_wait_is_told_at_growing_distances(monkeypatch):
    monkeypatch.setattr(view, "SILENCE_S", 0.3)
    screen = io.StringIO()
    with LiveProgress(Console(file=screen, width=140)) as watch:
        watch(Event("setup", text="verifying weights"))
        time.sleep(2.9)
        watch(Event("stage", "gspo", text="drawing batch 3"))
        time.sleep(0.9)
    verifying, drawing = (
        [x for x in screen.getvalue().splitlines() if words in x] for words in ("verifying", "batch 3")
    )
    assert "so far" not in verifying[0]
    assert 3 <= len(verifying) <= 6
    assert all("verifying weights: " in line and line.endswith(" s so far") for line in verifying[1:])
    assert any("gspo drawing batch 3: " in line for line in drawing)


def test_the_reward_of_training_samples_is_not_taken_for_the_held_out_one():
    metrics = {**UPDATE, "gate/acceptance_seq": 1.0}
    text = shown(Event("update", "a", 8, 64, metrics=metrics), Event("eval", "a", 8, 64, metrics={"reward": 0.156}))
    assert "training reward 0.625" in text
    assert "held-out reward 0.156" in text
    assert " reward 0.625" not in text.replace("training reward", "")


def test_a_stage_of_the_whole_run_has_no_name_before_it(monkeypatch):
    monkeypatch.setattr(view, "SILENCE_S", 0.2)
    screen = io.StringIO()
    with LiveProgress(Console(file=screen, width=140)) as watch:
        watch(Event("update", "a", 64, 64, metrics=UPDATE))
        time.sleep(0.7)
        watch(Event("stage", text="writing the page"))
    lines = [line.partition(" ")[2] for line in screen.getvalue().splitlines()]
    assert lines[-1] == "writing the page"
    assert any(line.startswith("a 64/64: nothing new for ") for line in lines), "how long ago, not how long it took"


def test_missing_numbers_are_dashes_and_markup_in_texts_is_text():
    text = shown(Event("arm", "a", text="[bold]x[/]"), Event("update", "a", 8, 64, metrics={"update": 8}))
    assert "[bold]x[/]" in text
    assert text.count("–") == 7


@pytest.mark.parametrize("kind", ["setup", "resume", "eval", "arm_done", "warm_start", "unheard_of"])
def test_every_kind_of_event_can_be_shown(kind):
    shown(Event(kind, "a", 100, 200, "words", {"reward": 0.5, "reward_after": 0.5, "loss": 1.0}))


@pytest.mark.parametrize("width", [140, 80])
def test_the_table_and_the_notes_at_both_widths(tmp_path: Path, width: int):
    summary = {
        "arm": "trm_max", "updates": 64, "reward_before": 0.6, "reward_after": 0.7, "kl_mean": 0.001,
        "kl_max": 0.2, "acceptance": 0.55, "ess_frac": 0.9, "bound": 1.234,
        "falsified_updates": 40, "log_ppl_gap": 0.01, "tokens_per_s": 1000.0, "seconds": 60.0,
        "grade": "exact", "notes": ["something a reader must know"],
    }  # fmt: skip
    (tmp_path / "arms" / "trm_max").mkdir(parents=True)
    (tmp_path / "arms" / "trm_max" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "name": "x", "table": [summary]}))
    text = printed(run_summary(read_run(tmp_path), width=width), width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("0.600 → 0.700", "55.0 %", "below 70 %", "1.23", "in 40 of 64", "something a reader must know", "Remark 4.3"):  # fmt: skip
        assert words in text, words


def test_a_finding_is_said_once_with_its_fix_and_markup_is_text():

    console = Console(record=True, width=200, file=io.StringIO())
    found = {"severity": "act", "symptom": "Tokens [bold]drift[/].", "fix": "Reduce the lag.", "page": "report.html#a"}
    with LiveProgress(console) as watch:
        watch(Event("finding", "none", 7, 10, "short", found))
    said = console.export_text()
    assert "none: update 7, act: Tokens [bold]drift[/]. Reduce the lag." in said
    assert "report.html" not in said, "the page is written when the run has ended"


def test_what_a_run_does_before_its_first_update_is_said_where_nothing_moves():
    console = Console(record=True, width=200, file=io.StringIO())
    with LiveProgress(console) as watch:
        watch(Event("stage", "none", text="drawing"))
        watch(Event("update", "none", 1, 10, metrics={}))
        watch(Event("stage", "none", text="training"))
    said = console.export_text()
    assert "none: drawing" in said
    assert "training" not in said
