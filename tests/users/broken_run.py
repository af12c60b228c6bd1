"""An engineer with a run that went wrong: what is it, what do I change, and did the change help?

python broken_run.py        # in an empty folder, with offdrift[audit] installed
"""

import json
from pathlib import Path

import torch
from shell import installed_package, offdrift

import offdrift as od


def find_the_cause() -> str:
    """The first two commands of the README; returns the folder of the audit."""
    demo = offdrift("demo", "broken")
    audit = offdrift(*demo.hint)
    assert "▲ Act" in audit.stdout, audit.stdout
    assert "Fix:" in audit.stdout, audit.stdout
    folder, words = Path("audits/broken"), offdrift("audit", "broken", "--json", "-q").stdout
    found = json.loads(words)
    assert found["verdict"]["level"] == "act"
    assert found["findings"][0]["rule"] == "wrong_weights", "the first finding is the cause that was planted"
    assert len(found["verdict"]["text"].split()) <= 15, found["verdict"]
    assert found["verdict"]["steps"], "a verdict comes with what to do"
    page = (folder / "report.html").read_text("utf-8")
    assert found["verdict"]["text"] in page
    assert audit.hint[:3] == ["audit", "LOG_AFTER_THE_FIX", "--out"], audit.stderr
    return str(folder)


def look_in_python() -> None:
    """The same from a notebook."""
    found = od.audit("broken")
    assert (found.verdict.level, found.findings[0].rule) == ("act", "wrong_weights")
    kl = found.to_frame()["mismatch/k3"]
    assert kl.iloc[-1] > 20 * kl.iloc[0], "the drift grows over the steps"
    assert "act" in repr(found).lower()
    assert "<svg" in found._repr_html_()


def record_the_repaired_run() -> None:
    """A loop of the engineer's own, which records what engine and trainer say of each token."""
    draw = torch.Generator().manual_seed(0)
    for step in range(16):
        trainer = -1 - 2 * torch.rand(24, 40, generator=draw)
        engine = trainer + 0.005 * torch.randn(24, 40, generator=draw)
        log = od.record(
            "repaired", step=step, logp_rollout=engine, logp_old=trainer, mask=torch.ones(24, 40),
            rewards=torch.rand(24, generator=draw).round(),
        )  # fmt: skip
    log.close()


def see_that_the_fix_helped(before: str) -> None:
    """The command that the audit suggested, with the log after the fix."""
    after = offdrift("audit", "repaired", "--out", "after", "--json", "-q")
    rules = [finding["rule"] for finding in json.loads(after.stdout)["findings"]]
    assert "wrong_weights" not in rules
    compared = offdrift("compare", before, "after")
    assert "after drifts less" in compared.stdout, compared.stdout
    assert Path("compare.html").is_file()


def be_wrong() -> None:
    """A path with a typing error: the message names it."""
    assert "brokn" in offdrift("audit", "brokn", status=1).stderr


if __name__ == "__main__":
    installed_package()
    audited = find_the_cause()
    look_in_python()
    record_the_repaired_run()
    see_that_the_fix_helped(audited)
    be_wrong()
    print("cause found, fix confirmed")
