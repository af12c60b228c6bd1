"""Every reader of files, called as a person or a command calls it, and a good input for each of them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from tests_lab.train.sweeps import fill, reward, sweep_of

from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.audit.watch import sources
from offdrift.check.check import read_prompts
from offdrift.cli import main
from offdrift.engines.grids import loadable
from offdrift.errors import OffdriftError
from offdrift.judge import load_rules
from offdrift.records import store
from offdrift.records.readers import detect, pieces, read
from offdrift.records.readers.metrics import MetricLog
from offdrift.records.readers.recognize import recognize
from offdrift.texts import read_bytes
from offdrift_lab.exact.length_bias import packaged, read_recording
from offdrift_lab.plan.drift import measured_fit
from offdrift_lab.plan.measured import gather
from offdrift_lab.train.data.problems import read_problems
from offdrift_lab.train.loop.old_policy import read_weights, write_weights
from offdrift_lab.train.loop.run_folder import ArmFolder, RunFolder
from offdrift_lab.train.settings.recipe import load_recipe
from tests.records.metric_files import WRITERS, write_events, write_wandb
from tests.records.samples import LOGS, rollouts
from tests.show.synthetic import overlap, write_run, write_token_log
from tests.show.synthetic_audit import audit

LIMIT = 64 << 20
"""Bytes that a log may take in memory."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reader:
    """A reader, the files of its input that are spoiled, and how a good input is made."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    """Of the folder that `make` filled."""
    files: str
    """Glob of what is spoiled."""
    refused: str = ""
    """Words of the refusal that the good input meets: it holds too little."""


def command(words: str, folder: Path) -> str:
    """Run `offdrift` in this process: what it printed; raises what is no exit with a status of the table."""
    arguments = ["offdrift", *(word.format(x=folder) for word in words.split())]
    out = io.StringIO()
    with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as end:
            status = end.code
        else:
            status = 0
    if status in (1, 2):
        raise OffdriftError(out.getvalue())
    assert status in (0, 3), f"status {status}: {out.getvalue()}"
    return out.getvalue()


def read_log(path: Path) -> None:
    """All of a log, as `offdrift audit` reads it."""
    log = detect([str(path)], limit=LIMIT)
    for piece in pieces(log):
        for place in read(piece, log).bad:
            assert place.reason
            assert len(place.reason) < 3000


def a_log(name: str) -> Callable[[Path], object]:
    """A file of a framework's, as its own writer wrote it."""
    return lambda folder: shutil.copy(LOGS / name, folder / f"step_7_{Path(name).name}")


def read_metrics(path: Path) -> None:
    """Metrics alone, as `offdrift audit` reads them."""
    log = recognize([str(path)], limit=LIMIT)
    for place in log.bad if isinstance(log, MetricLog) else ():
        assert place.reason
        assert len(place.reason) < 3000


def a_run(folder: Path) -> None:
    overlap(write_run(folder / "run", updates=3))
    store.write(rollouts(), folder / "run/arms/none/rollouts/batch-000000.parquet")


def a_part(folder: Path) -> None:
    write_token_log(folder, 1, [0, 1, 1, 0, 2, 1])
    log = detect([str(folder)])
    (folder / "part.npz").write_bytes(work(pieces(log)[0], Job(log)).to_bytes())


def an_audit(folder: Path) -> None:
    (folder / "audit.json").write_text(json.dumps(audit(steps=3)))


def a_sweep(folder: Path) -> None:
    grid = sweep_of(folder, "seeds = 2")
    fill(grid, reward)
    command("sweep {x}/s.toml --report --out {x}/out", folder)


def a_log_of_a_run(folder: Path) -> None:
    a_run(folder)
    write_token_log(folder / "run/arms/none", 1, [0, 1, 1, 0, 2, 1])


RECIPE = (ROOT / "recipes/tiny.toml").read_text()
RULES = "[thresholds]\nkl_large = 0.1\n[rules.token_drift]\nseverity = 'act'\n[fixes.sync_more]\ndo = 'sync'\n"
PHASES = "name = 'p'\n[batch]\ngroups = 8\nsamples = 4\n[rollout]\nworkers = 2\n[lengths]\nkind = 'lognormal'\n"
PROBLEMS = '{"prompt": "1+1?", "answer": 2, "split": "train"}\n{"prompt": "2+2?", "answer": "4", "split": "eval"}\n'


def text(name: str, content: str) -> Callable[[Path], object]:
    """A file with this content."""
    return lambda folder: (folder / name).write_text(content)


def weights(folder: Path) -> None:
    write_weights({"a": torch.ones(2, 3), "b": torch.zeros(2)}, folder / "w.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def read_w8a8(folder: Path) -> None:
    with loadable(str(folder), frozenset({"a"})) as path:
        assert Path(path).is_dir()


def follow(path: Path) -> None:
    """One look of `offdrift watch`."""
    for source in sources(path):
        list(source.poll())
        list(source.finish())


def read_part(path: Path) -> None:
    with contextlib.suppress(OSError):
        AuditPartial.from_bytes(read_bytes(path))


def read_rollouts(folder: Path) -> None:
    for file in folder.glob("*.parquet"):
        store.read(file)
        store.read_drawn_by(file)


LOG_FILES = {
    "nemo-rl": "nemo_rl/train_data_step7.jsonl",
    "prime-rl": "prime_rl/token_exports/step_7/rank_0.jsonl",
    "prime-rl traces": "prime_rl_traces/rollouts/step_7/train/effective/traces.jsonl",
    "open-instruct": "open_instruct/run_rollouts_000000.jsonl",
    "slime": "slime/train_data/7.pt",
    "miles": "miles/train_data/7_0.pt",
    "miles columns": "miles/dashboard_columns/rollout_7.parquet",
    "skyrl": "skyrl/dumped_data/global_step_7_training_input.pkl",
}
PLAIN = '{"step": 1, "logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.5], "reward": 1, "prompt": "p", "mask": [1, 1]}\n'

READERS: dict[str, Reader] = {
    **{name: Reader(a_log(file), read_log, "step_7_*") for name, file in LOG_FILES.items()},
    "plain lines": Reader(text("a.jsonl", 3 * PLAIN), read_log, "a.jsonl"),
    "own log": Reader(lambda folder: write_token_log(folder, 1, [0, 1, 1, 0, 2, 1]), read_log, "**/*.parquet"),
    **{f"metrics: {name}": Reader(write, read_metrics, "*") for name, write in WRITERS.items()},
    "audit of metrics": Reader(write_wandb, lambda folder: command("audit {x} --out {x}/audit", folder), "*.wandb"),
    "watched metrics": Reader(
        write_events, lambda folder: command("watch {x} --until-idle 0 --every 0.05", folder), "events*"
    ),
    "growing log": Reader(text("a.jsonl", 3 * PLAIN), follow, "a.jsonl"),
    "rollouts": Reader(lambda folder: store.write(rollouts(), folder / "batch-000001.parquet"), read_rollouts, "*.p*"),
    "part of an audit": Reader(a_part, lambda folder: read_part(folder / "part.npz"), "part.npz"),
    "recording": Reader(
        lambda folder: shutil.copy(packaged()[0], folder / "r.npz"),
        lambda folder: read_recording(folder / "r.npz"),
        "r.npz",
    ),
    "audit": Reader(an_audit, lambda folder: command("report {x}", folder), "audit.json"),
    "compared audits": Reader(
        an_audit, lambda folder: command("compare {x} {x} --out {x}/c.html", folder), "audit.json"
    ),
    "planned audit": Reader(
        an_audit,
        lambda folder: command("plan {x} --drift {x} -s sync --set run.updates=2 --set run.warmup=0", folder),
        "audit.json",
    ),
    "bounded audit": Reader(an_audit, lambda folder: command("bound --T 64 --from {x}", folder), "audit.json"),
    "run": Reader(a_run, lambda folder: command("report {x}/run", folder), "run/**/*.json*"),
    "watched run": Reader(
        a_run, lambda folder: command("watch {x}/run --until-idle 0 --every 0.05", folder), "run/**/*.json*"
    ),
    "planned run": Reader(
        a_run,
        lambda folder: command("plan {x}/run -s sync --set run.updates=2 --set run.warmup=0", folder),
        "run/**/*[n0].[jp]*",
    ),
    "fitted run": Reader(a_run, lambda folder: measured_fit(folder / "run/arms/none"), "run/arms/none/m*.jsonl"),
    "bounded run": Reader(a_run, lambda folder: command("bound --T 64 --from {x}/run", folder), "run/**/[mr]*.json*"),
    "resumed run": Reader(
        a_run,
        lambda folder: (
            RunFolder(folder / "run").head(),
            ArmFolder(folder / "run/arms/none").summary(),
            ArmFolder(folder / "run/arms/none").rows("metrics"),
        ),
        "run/**/[mrs]*.json*",
    ),
    "log of a run": Reader(
        a_log_of_a_run,
        lambda folder: command("audit {x}/run/arms/none --out {x}/audit --sample-mib 1", folder),
        "run/run.json",
    ),
    "collapse": Reader(a_run, lambda folder: command("lab collapse {x}", folder), "run/**/[mr]*.json*", "collapse"),
    "sweep": Reader(a_sweep, lambda folder: command("report {x}/out", folder), "out/**/*.json*"),
    "lag law": Reader(
        a_sweep, lambda folder: command("lab lag-law {x}/out", folder), "out/sweep.json", "no finished run"
    ),
    "sweep file": Reader(
        lambda folder: sweep_of(folder, "seeds = 2"),
        lambda folder: command("sweep {x}/s.toml --dry-run --out {x}/out", folder),
        "*.toml",
    ),
    "recipe": Reader(text("r.toml", RECIPE), lambda folder: load_recipe(folder / "r.toml"), "r.toml"),
    "rules": Reader(text("rules.toml", RULES), lambda folder: load_rules(folder / "rules.toml"), "rules.toml"),
    "phases": Reader(text("p.toml", PHASES), lambda folder: gather([folder / "p.toml"]), "p.toml"),
    "problems": Reader(text("p.jsonl", PROBLEMS), lambda folder: read_problems(folder / "p.jsonl"), "p.jsonl"),
    "prompts": Reader(text("p.jsonl", PROBLEMS), lambda folder: read_prompts(folder / "p.jsonl"), "p.jsonl"),
    "weights": Reader(weights, lambda folder: read_weights(folder / "w.safetensors"), "w.safetensors"),
    "weights for vLLM": Reader(weights, read_w8a8, "*"),
}
