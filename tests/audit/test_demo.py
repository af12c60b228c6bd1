"""The demo's log is honest about what it drew, and an audit finds its fault."""

import json
import re

import numpy as np
from typer.testing import CliRunner

from offdrift.audit.demo import demo_rows, write_demo
from offdrift.cli import application


def test_the_log_is_what_it_says(tmp_path):
    rows = [json.loads(line) for line in write_demo(tmp_path / "d").read_text().splitlines()]
    assert rows == demo_rows()
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["log.jsonl"]
    first, last = ([r for r in rows if r["step"] == s] for s in (0, 15))
    gap = [
        np.mean(np.concatenate([np.subtract(r["logp_rollout"], r["logp_old"]) for r in part])) for part in (first, last)
    ]
    assert abs(gap[0]) < 0.01, "engine and trainer start alike"
    assert gap[1] > 0.05, "fifteen updates that never arrived"
    ratios = np.concatenate([np.exp(np.subtract(r["logp_old"], r["logp_rollout"])) for r in rows])
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / len(ratios) ** 0.5, "the engine recorded what it drew from"


def test_the_repaired_run_is_one_to_compare_with(tmp_path, monkeypatch):
    """What the screens name goes through: demo, audit, the repaired demo, its audit, and both side by side."""
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    said = ""
    for words in ("demo", "audit drift-demo", "demo --repaired", "audit drift-demo-repaired",
                  "compare audits/drift-demo audits/drift-demo-repaired"):  # fmt: skip
        done = run.invoke(application(), words.split())
        assert done.exit_code == 0, done.output
        said += done.output
    levels = [json.loads((tmp_path / f"audits/{n}/audit.json").read_text())["verdict"]["level"]
              for n in ("drift-demo", "drift-demo-repaired")]  # fmt: skip
    assert levels[0] in ("act", "stop")
    assert levels[1] == "ok"
    assert "drift-demo-repaired drifts less" in said
    assert "offdrift audit LOG_AFTER_THE_FIX --out REPAIRED && offdrift compare audits/drift-demo REPAIRED" in said
    (details,) = re.findall(r"Details: (\S+)#", said)
    assert (tmp_path / details).is_file()


def test_an_audit_of_it_names_the_fault(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    made = run.invoke(application(), ["demo"])
    assert made.exit_code == 0, made.output
    assert "offdrift audit drift-demo" in made.output
    done = run.invoke(application(), ["audit", "drift-demo", "--json", "--out", "out"])
    assert done.exit_code == 0, done.output
    stored = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert stored["findings"][0]["rule"] == "wrong_weights"
    assert stored["verdict"]["level"] in ("act", "stop")
