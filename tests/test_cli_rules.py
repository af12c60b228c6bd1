"""`--rules` on every command that judges: what it changes, what a run stores, and by what it is judged later."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import typer
from tests_lab.train.sweeps import fill, sweep_of

from offdrift import cli
from offdrift.adapters.base import Adapter
from offdrift.engines.hf import TransformersEngine
from offdrift.judge import load_rules
from offdrift.models import load_model
from offdrift.records import Sampling
from offdrift.records.recorder import write_log
from offdrift.records.store import write
from offdrift_lab.train.report.page import write_sweep
from tests.audit.logs import drawn as logged
from tests.command import Done, command
from tests.show.synthetic import write_run

RECIPE = """
name = "tiny"
model = "tiny-qwen3"
task = "arithmetic"
method = "trm_max"
batches = 2
rollout = { prompts = 2, samples = 2, max_tokens = 4, evidence = "full" }
log = { eval_every = 2, eval_prompts = 2, checkpoint_every = 1, samples_every = 2, trackers = [] }
[warm_start]
steps = 0
"""
STRICT = """
[thresholds]
kl_clean = 1e-9
kl_large = 1e-8
acceptance_low = 2.0
reward_lost = 0.01
trust_region = 1e-12
collapse_recovery = 2
"""
"""Thresholds that nothing keeps to."""


def leaves(command: typer.core.TyperGroup, path: tuple[str, ...] = ()) -> dict[str, typer.core.TyperCommand]:
    """Every command of the command line, by the words that call it."""
    found = {}
    for name, sub in command.commands.items():
        below = {" ".join((*path, name)): sub}
        found |= leaves(sub, (*path, name)) if hasattr(sub, "commands") else below
    return found


COMMANDS = leaves(typer.main.get_command(cli.application()))
TAKE_RULES = {name for name, sub in COMMANDS.items() if any("--rules" in p.opts for p in sub.params)}
JUDGE_NOTHING = {
    "demo": "writes a log",
    "docs": "shows a page",
    "schema": "describes files",
    "methods": "shows a table",
    "rules": "shows the rules themselves",
    "schedules": "shows a table",
    "bound": "evaluates inequalities",
    "lab bounds": "checks inequalities",
    "lab coverage": "counts false certificates",
    "lab frontier": "measures gradients of known policies",
    "lab routing": "measures surrogates of known policies",
    "lab masking": "measures gradients of known policies",
    "lab three-policies": "checks inequalities",
    "lab flips": "measures gradients of known policies",
    "lab length-bias": "measures gradients of known policies",
    "lab lengths": "evaluates gates and bounds by length",
    "lab lag-law": "fits a law to sweeps",
}
"""Commands whose output depends on no threshold of the rules."""


@pytest.fixture
def strict(tmp_path: Path) -> Path:
    file = tmp_path / "strict.toml"
    file.write_text(STRICT)
    return file


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def go(*words: object) -> Done:
        done = command(monkeypatch, capsys, *map(str, words), width=240)
        assert done.code in (0, 3), done.stderr
        return done

    return go


def log(folder: Path) -> Path:
    """A log in which nothing is wrong."""
    for i in range(2):
        write_log(logged(seed=i, steps=4, sequences=40), folder / "log" / f"batch-{i}.parquet")
    return folder / "log"


def with_rules_of(folder: Path, file: Path) -> None:
    """Note in a run's record the rules that it was started with, as the trainer does."""

    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(head | load_rules(file).as_record()))


def audits(run, folder: Path, *words: object) -> str:
    run("audit", log(folder), "--out", folder / "audit", *words, "--quiet")
    return level(folder / "audit" / "audit.json")


def level(file: Path) -> str:
    return json.loads(file.read_text())["verdict"]["level"]


def audited(run, folder: Path, *words: object) -> str:
    return audits(run, folder, *words)


def watched(run, folder: Path, *words: object) -> str:
    lines = run("watch", log(folder), "--until-idle", "0.2", "--every", "0.05", "--json", *words).stdout.splitlines()
    severities = [row["severity"] for row in map(json.loads, lines) if row["kind"] == "finding"]
    return next((word for word in ("stop", "act", "watch") if word in severities), "ok")


def reported(run, folder: Path, *words: object) -> str:
    page = run("report", write_run(folder / "run", updates=4), *words).stdout
    return ", ".join(re.findall(r"less than \d+ %", page))


def compared(run, folder: Path, *words: object) -> str:
    audits(run, folder)
    found = json.loads(run("compare", folder / "audit", folder / "audit", "--json", *words).stdout)
    return found["verdicts"]["a"]["level"]


def planned(run, folder: Path, *words: object) -> str:
    lags = [{"low": k, "high": k, "tokens": 1000, "full/k3": 0.001 + 0.001 * k} for k in range(4)]
    folder.mkdir(exist_ok=True)
    content = {"kind": "audit", "format": 1, "facets": {"lag": lags}}
    (folder / "audit.json").write_text(json.dumps(content))
    few = ("-s", "sync", "-s", "one_step_off", "--this-split", "--bounds", "1", "--set", "run.updates=4")
    words = (*few, "--drift", folder / "audit.json", *words)
    told = " ".join(run("plan", *words).stdout.split())
    return " ".join(re.findall(r"predicted (?:KL is below|to drift by) \S+ nat(?: or more)?", told))


def swept(run, folder: Path, *words: object) -> str:
    folder.mkdir(exist_ok=True)
    grid = sweep_of(folder, "seeds = 2\n")
    fill(grid, lambda setting, seed, update: 0.5 if update < 2 else 0.48)
    found = json.loads(run("sweep", folder / "s.toml", "--out", folder / "out", "--report", "--json", *words).stdout)
    return f"{sum(row['collapsed'] for row in found['settings'])} collapsed"


def certified(run, folder: Path, *words: object) -> str:
    model, _ = load_model("tiny-qwen3", seed=0)
    drawn = TransformersEngine(model, dtype="float32").generate(
        [[5, 6, 7 + i // 2] for i in range(6)], Sampling(max_tokens=4), seed=0, evidence="full"
    )
    drawn = drawn.with_(rewards=torch.rand(6), group_ids=torch.arange(6) // 2)
    write(drawn, folder / "rollouts" / "batch-0.parquet")
    found = json.loads(run("certify", folder / "rollouts", "--model", "tiny-qwen3-moe", "--json", *words).stdout)
    return f"KL at most {found['region']['delta']:g}"


def checked(run, folder: Path, *words: object) -> str:
    few = ("--max-prompts", "2", "--max-tokens", "4", "--factors", "none", "--model", "tiny-qwen3")
    run("check", "--rollout", "transformers:bfloat16", *few, "--out", folder / "check", "--quiet", *words)
    return level(folder / "check" / "check.json")


def trained(run, folder: Path, *words: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "r.toml").write_text(RECIPE)
    done = run("train", folder / "r.toml", "--out", folder / "run", *words)
    return ", ".join(re.findall(r"less than \d+ %", done.stdout))


def collapsing(run, folder: Path, *words: object) -> str:
    scale = ("--horizon", "3", "--window", "3", "--folds", "2")
    for seed in range(4):
        arm = folder / f"run-{seed}" / "arms" / "none"
        arm.mkdir(parents=True, exist_ok=True)
        fell = 0.2 if seed < 2 else 0.95
        rewards = [1.0] * 10 + [fell] * 10
        lines = [json.dumps({"update": i, "reward/mean": x, "full/k3": 0.01 * i}) for i, x in enumerate(rewards, 1)]
        (arm / "metrics.jsonl").write_text("\n".join(lines))
        (folder / f"run-{seed}" / "run.json").write_text(json.dumps({"recipe": {"seed": seed}}))
    few = () if words else ("--recovery", "2")
    return f"{json.loads(run('lab', 'collapse', folder, *scale, *few, '--json', *words).stdout)['collapsed']} collapse"


VERDICTS = {
    "audit": (audited, "ok", "act"),
    "watch": (watched, "ok", "act"),
    "report": (reported, "", "less than 200 %"),
    "compare": (compared, "ok", "act"),
    "plan": (planned, "predicted KL is below 0.02 nat", "predicted to drift by 1e-08 nat or more"),
    "sweep": (swept, "0 collapsed", "4 collapsed"),
    "certify": (certified, "KL at most 0.05", "KL at most 1e-12"),
    "check": (checked, "ok", "act"),
    "train": (trained, "", "less than 200 %"),
    "lab collapse": (collapsing, "2 collapse", "4 collapse"),
}
"""Commands that judge: what each says by the built-in rules, and by strict ones."""


def test_every_command_either_takes_rules_or_judges_nothing():
    assert VERDICTS.keys() == TAKE_RULES
    assert TAKE_RULES | JUDGE_NOTHING.keys() == COMMANDS.keys()
    assert not TAKE_RULES & JUDGE_NOTHING.keys()


@pytest.mark.parametrize("name", VERDICTS)
def test_a_threshold_that_is_moved_changes_what_a_command_says(name, run, strict, tmp_path):
    says, built_in, moved = VERDICTS[name]
    assert says(run, tmp_path / "a") == built_in
    assert says(run, tmp_path / "b", "--rules", strict) == moved


@pytest.mark.parametrize("name", VERDICTS)
def test_a_wrong_rules_file_is_refused_by_name_before_anything_is_done(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("[thresholds]\nkl_larg = 0.1\n")
    says, *_ = VERDICTS[name]

    def refused(*words: object) -> Done:
        done = command(monkeypatch, capsys, *map(str, words), width=240)
        if "--rules" in words:
            assert done.code == 1
            assert WRONG in done.stderr
            raise Refused
        return done

    with pytest.raises(Refused):
        says(refused, tmp_path / "a", "--rules", tmp_path / "wrong.toml")


WRONG = "wrong.toml: [thresholds]: unknown key 'kl_larg'; did you mean 'kl_large'?"


class Refused(Exception):
    """A command that refused its rules file, as it should."""


# -- a run is judged later by the rules that it was started with ------------------------------------------------


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def own_rules(tmp_path_factory):
    file = tmp_path_factory.mktemp("rules") / "mine.toml"
    file.write_text(STRICT)
    return file


@pytest.fixture(scope="module")
def trained_run(own_rules, tmp_path_factory):
    """A run that a recipe with rules of its own has made; the rules file is gone afterwards."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "r.toml").write_text(f'{RECIPE}[diagnosis]\nrules = "{own_rules.name}"\n'.replace("method =", "method ="))
    (folder / own_rules.name).write_text(own_rules.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["offdrift", "train", "r.toml", "--out", "run", "--quiet"])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    (folder / own_rules.name).unlink()
    return folder / "run"


NAME = f"mine.toml (sha256 {hashlib.sha256(STRICT.encode()).hexdigest()[:12]})"
STORED = f"Judged by {NAME}, as stored with the run."
STARTED = f"was started with {NAME}"
GIVEN = f"given with --rules; the run {STARTED}."
OF_SWEEP = "as stored with the sweep."
FELL = "reward fell 1 % below its best"


def test_a_run_stores_content_and_digest_of_its_rules(trained_run):
    head = json.loads((trained_run / "run.json").read_text())
    assert head["rules"]["text"] == STRICT
    assert head["rules"]["sha256"] == hashlib.sha256(STRICT.encode()).hexdigest()
    assert head["limits"]["acceptance_low"] == 2.0
    assert head["limits"].keys() == load_rules().limits.keys()


def test_its_page_its_watch_and_its_audit_judge_by_them(run, trained_run, tmp_path):
    told = one_line(run("report", trained_run).stdout)
    assert "less than 200 %" in told
    assert STORED in told
    page = (trained_run / "report.html").read_text()
    assert STORED in page
    assert "watch: 200 % or more" in page.lower()
    arm = trained_run / "arms" / "trm_max"
    run("audit", arm, "--out", tmp_path / "audit", "--quiet")
    audit = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert audit["limits"]["acceptance_low"] == 2.0
    assert audit["judged_by"] == STORED
    assert NAME in (tmp_path / "audit" / "report.html").read_text()
    assert NAME in run("watch", trained_run, "--until-idle", "0.1", "--every", "0.05").stderr


def test_rules_of_the_command_line_stand_above_those_of_the_run(run, trained_run, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[thresholds]\nacceptance_low = 0.0\n")
    told = one_line(run("report", trained_run, "--rules", other).stdout)
    assert "less than" not in told
    assert GIVEN in told
    assert json.loads((trained_run / "run.json").read_text())["rules"]["text"] == STRICT, "the record stays"
    assert "less than 200 %" in one_line(run("report", trained_run).stdout), "and the next page is by it again"


def test_findings_of_other_rules_are_made_from_the_stored_metrics(run, trained_run, tmp_path):
    always = tmp_path / "always.toml"
    always.write_text(
        "rules.planted = { cause = 'planted', symptom = 'PLANTED', explanation = 'x', refuted_by = 'x', fix = 'halve_lr',"
        " severity = 'stop', all = [{ metric = 'kl', above = -1000 }] }\nthresholds.patience = 1\n"
    )
    run("report", trained_run, "--rules", always)
    assert "PLANTED" in (trained_run / "report.html").read_text()
    run("report", trained_run)
    assert "PLANTED" not in (trained_run / "report.html").read_text()


def test_a_resumed_run_keeps_its_rules_and_refuses_others(run, monkeypatch, capsys, trained_run, tmp_path):
    recipe = trained_run.parent / "r.toml"
    (trained_run.parent / "mine.toml").write_text("")  # the recipe's file has changed since
    run("train", recipe, "--out", trained_run, "--resume")
    assert json.loads((trained_run / "run.json").read_text())["rules"]["text"] == STRICT
    (tmp_path / "other.toml").write_text("")
    words = ("train", str(recipe), "--out", str(trained_run), "--resume", "--rules", str(tmp_path / "other.toml"))
    done = command(monkeypatch, capsys, *words, width=240)
    assert done.code == 1
    assert STARTED in done.stderr
    assert "offdrift report --rules FILE" in done.stderr


def test_a_record_that_was_changed_is_refused_and_rules_help(monkeypatch, capsys, run, strict, tmp_path):
    folder = write_run(tmp_path / "run", updates=4)
    with_rules_of(folder, strict)
    head = json.loads((folder / "run.json").read_text())
    head["rules"]["text"] = head["rules"]["text"].replace("2.0", "0.1")
    (folder / "run.json").write_text(json.dumps(head))
    done = command(monkeypatch, capsys, "report", str(folder), width=240)
    assert done.code == 1
    assert "rules.sha256" in done.stderr
    assert "--rules" in done.stderr
    assert "less than 200 %" in one_line(run("report", folder, "--rules", strict).stdout)


def test_a_sweep_keeps_the_rules_it_was_started_with(run, strict, tmp_path):
    grid = sweep_of(tmp_path, f'seeds = 2\n[set]\ndiagnosis.rules = "{strict.name}"\n')
    fill(grid, lambda setting, seed, update: 0.5 if update < 2 else 0.48)
    document, page = write_sweep(grid)
    assert document["rules"]["text"] == STRICT
    assert sum(row["collapsed"] for row in document["settings"]) == 4
    assert FELL in page.read_text()
    strict.write_text("")
    told = one_line(run("report", tmp_path / "out").stdout)
    assert OF_SWEEP in told
    assert FELL in told
    mild = tmp_path / "mild.toml"
    mild.write_text("[thresholds]\nreward_lost = 0.5\n")
    run("report", tmp_path / "out", "--rules", mild)
    again = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert sum(row["collapsed"] for row in again["settings"]) == 0
    assert again["rules"]["text"] == STRICT


def test_a_stored_audit_is_judged_again_and_stays_as_it_is(run, strict, tmp_path):
    assert audits(run, tmp_path) == "ok"
    before = (tmp_path / "audit" / "audit.json").read_bytes()
    told = json.loads(run("report", tmp_path / "audit", "--rules", strict, "--json").stdout)
    assert told["verdict"]["level"] == "act"
    assert (tmp_path / "audit" / "audit.json").read_bytes() == before
    assert audits(run, tmp_path / "x", "--rules", strict) == "act"
    fresh = json.loads((tmp_path / "x" / "audit" / "audit.json").read_text())
    assert [f["rule"] for f in told["findings"]] == [f["rule"] for f in fresh["findings"]]
    assert told["suggestion"] == fresh["suggestion"]


# -- `offdrift rules` --------------------------------------------------------------------------------------------


def test_the_thresholds_are_shown_with_unit_meaning_and_source(run):
    told = one_line(run("rules").stdout)
    for name, threshold in load_rules().thresholds.items():
        assert f"{name} {threshold.value:g}" in told
    assert json.loads(run("rules", "--json").stdout)["limits"] == load_rules().limits


def test_a_file_to_start_from_changes_nothing_until_a_comment_is_removed(run, tmp_path):
    text = run("rules", "--toml").stdout
    (tmp_path / "mine.toml").write_text(text)
    assert "it changes nothing." in run("rules", "mine.toml").stdout
    (tmp_path / "mine.toml").write_text(text.replace("# kl_large = 0.05", "kl_large = 0.2"))
    told = run("rules", "mine.toml").stdout
    assert "it changes 1 entry:" in told
    assert "kl_large: 0.05 → 0.2 nat" in told
    (tmp_path / "all.toml").write_text(re.sub(r"^# ", "", text, flags=re.MULTILINE))
    assert load_rules(tmp_path / "all.toml").limits == load_rules().limits


def test_an_adapter_stores_its_rules_beside_the_record_and_the_audit_judges_by_them(run, strict, tmp_path):
    adapter = Adapter("token_tis", framework="plain", rules=strict, record=tmp_path / "record", on_idle="warn")
    adapter.recorder.close()
    write_log(logged(seed=0, steps=4, sequences=40), tmp_path / "record" / "batch-0.parquet")
    run("audit", tmp_path / "record", "--out", tmp_path / "audit", "--quiet")
    audit = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert (audit["source"]["files"], audit["verdict"]["level"]) == (1, "act")
    assert audit["rules"]["text"] == STRICT
    Adapter("token_tis", framework="plain", record=tmp_path / "plain", on_idle="warn").recorder.close()
    assert not (tmp_path / "plain" / "rules.json").exists()


def test_one_rule_is_shown_in_full(monkeypatch, capsys):
    text = " ".join(command(monkeypatch, capsys, "rules", "stale_engine", width=200).stdout.split())
    rule = load_rules().rules["stale_engine"]
    for words in (rule.symptom, rule.refuted_by, rule.when.describe(load_rules().thresholds)):
        assert " ".join(words.split()) in text
    told = json.loads(command(monkeypatch, capsys, "rules", "stale_engine", "--json").stdout)
    assert (told["severity"], told["fix"]["do"]) == (rule.severity, load_rules().fixes[rule.fix].do)


def test_every_rule_can_be_shown(monkeypatch, capsys):
    for name in load_rules().rules:
        assert command(monkeypatch, capsys, "rules", name).stdout.startswith(name)
