"""Commands struck at random points, and what is lost: killed, terminated, out of disk, unwritable, under another clock.

    python benchmarks/kills.py [--strikes 200] [--subjects record,train] [--harms kill,full] [--seed 0] [--json FILE]

A trial starts a command, strikes it once at a random moment (every third time while it is writing a file, every third
time once it has acknowledged something), mends what the strike has broken, and runs the command again to its end. The
same --json FILE goes on with a campaign that was interrupted, with other subjects too. A trial compares:

- what had been acknowledged before the strike (a flush that returned, the updates before a checkpoint, a finished run
  of a sweep, a part of an audit) must be there untouched: its rows, times included, are those of before;
- what the command ends with must be that of a command that nobody struck, bit for bit;
- no half-written file and no process may be left.

Harms: `kill` is SIGKILL, `term` SIGTERM, `full` fills the file system (a small tmpfs), `readonly` takes the right to
write from every folder and file, `clock` dates all files back or ahead, which is what a jump of the clock looks like
to a program that compares dates of files with the time or with each other.

Commands are forked from a process that has imported what they need, so that a strike hits work and not imports; they run
`offdrift` as the shell does and end as interpreters end. The script puts itself into a mount namespace of its own
(`unshare`), and commands run without the right of root to write everywhere (`setpriv`). Linux only. Rollout workers
have a script of their own, kill_workers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pyarrow.parquet as pq
from forge import IMPORTED, RECORDER, Forge, serve

HARMS = ("kill", "term", "full", "readonly", "clock")
ROOT = Path(__file__).parents[1]
DISK_MIB = 512
TIMES = ("seconds", "throughput/", "memory/", "pipeline/", "created")
"""Parts of the names of metrics that are about the machine and not about the run."""

# -- what is struck


@dataclass(frozen=True)
class Subject:
    """A command that stores what it does in a folder."""

    prepare: Callable[[Path], Any]
    """Writes what all trials read into a folder."""
    words: Callable[[Path, Path], list[str]]
    """The command, of the prepared folder and the one to write to."""
    again: tuple[str, ...]
    """Added to the command to go on."""
    kept: Callable[[Path], dict[str, Any]]
    """What a folder acknowledges at any time, by name."""
    facts: Callable[[Path], dict[str, Any]]
    """What a finished folder says, times left out."""
    ended: Callable[[Path], bool] = lambda out: (out / "report.html").exists()
    """Whether nothing is left to do but to end the process, in which Python no longer listens to signals."""
    politely: int = 130
    """Status after SIGTERM."""


RUN = """
name = "struck"
model = "tiny-qwen3"
reward = "{root}/recipes/digits.py:digits"
batches = 12
warm_start = {{ steps = 0 }}
rollout = {{ dtype = "float32", prompts = 2, samples = 2, max_tokens = 6, quantization = "int8" }}
lag = {{ sync_every = 2 }}
optim = {{ lr = 1e-3 }}
log = {{ eval_every = 12, eval_prompts = 2, checkpoint_every = 2, samples_every = 4, trackers = [] }}
[arms.none]
method = "none"
"""
PIPELINE = "[pipeline]\nschedule = 'verl_partial'\nworkers = 1\ncpus = 0.1\nslots = 4\nsteps = 2\nupdate_rounds = 2\n"
SWEEP = """
name = "struck"
recipe = "run"
seeds = 2
arms = ["none", "trm_max"]
set = { batches = 4, log.eval_every = 4 }
compare = { metric = "reward/mean" }
"""


def recipe(folder: Path, *, pipeline: bool = False) -> None:
    text = RUN.format(root=ROOT)
    if pipeline:
        text = text.replace("lag = { sync_every = 2 }\n", "").replace("[arms.none]", f"{PIPELINE}[arms.none]")
        text = text.replace(', quantization = "int8"', "")
    (folder / "run.toml").write_text(text)


def sweep(folder: Path) -> None:
    recipe(folder)
    (folder / "sweep.toml").write_text(SWEEP)


def log(folder: Path) -> None:
    """A log of 40 files."""
    import torch

    from offdrift.records import recorder as records

    generator = torch.Generator().manual_seed(0)
    with records.Recorder(folder / "log", seconds=0) as recorder:
        for step in range(40):
            records.record(recorder, **batch_of(step, generator))
            recorder.flush()


def batch_of(step: int, generator: Any) -> dict[str, Any]:
    """A batch of 64 sequences of 8 tokens, as `record` takes it."""
    import torch

    logp = -1 - 2 * torch.rand(64, 8, generator=generator)
    drift = 0.01 * torch.randn(64, 8, generator=generator)
    rewards = torch.rand(64, generator=generator)
    mask = torch.ones(64, 8)
    return {"step": step, "logp_rollout": logp, "logp": logp + drift, "mask": mask, "rewards": rewards}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a line file; raises if one is not whole, but for a last one without its end."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not any(part in key for part in TIMES)}


def half_written(folder: Path) -> list[str]:
    """Hidden files but the lock of a sweep."""
    return [str(p.relative_to(folder)) for p in folder.rglob(".*") if p.name != ".lock"]


def kept_of_run(run: Path) -> dict[str, Any]:
    """The rows and files of the updates before the newest checkpoint."""
    kept: dict[str, Any] = {}
    for arm in (run / "arms").glob("*"):
        newest = max((arm / "checkpoints").glob("batch-*/position.json"), default=None)
        if newest is None and not (arm / "summary.json").exists():
            continue
        position = {"batch": 10**9, "version": 10**9}
        if not (arm / "summary.json").exists() and newest is not None:
            position = json.loads(newest.read_text())
        for row in rows(arm / "metrics.jsonl"):
            if row["update"] <= position["version"]:
                kept[f"{arm.name} update {row['update']}"] = row
        for file in arm.glob("*/batch-*.parquet"):
            if int(file.name[6:12]) < position["batch"]:
                kept[f"{arm.name} {file.parent.name}/{file.name}"] = digest(file)
    return kept


def facts_of_run(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"half-written": half_written(run)}
    for arm in sorted((run / "arms").glob("*")):
        for name in ("metrics", "eval"):
            facts[f"{arm.name} {name}"] = [timeless(row) for row in rows(arm / f"{name}.jsonl")]
        facts[f"{arm.name} model"] = digest(arm / "model/model.safetensors")
        for file in sorted(arm.glob("rollouts/batch-*.parquet")):
            facts[f"{arm.name} {file.name}"] = pq.read_table(file, columns=["tokens", "logp_rollout"]).to_pydict()
        facts[f"{arm.name} log"] = [pq.read_table(f).num_rows for f in sorted(arm.glob("log/batch-*.parquet"))]
    return facts


def runs_of(sweep: Path) -> Iterator[tuple[str, Path]]:
    for run in sorted(sweep.glob("runs/*/*/seed-*")):
        yield str(run.relative_to(sweep)), run


def facts_of_sweep(folder: Path) -> dict[str, Any]:
    facts = {name: facts_of_run(run) for name, run in runs_of(folder)}
    document = json.loads((folder / "sweep.json").read_text())
    return {"half-written": half_written(folder), **facts, "table": document["settings"]}


def kept_of_sweep(folder: Path) -> dict[str, Any]:
    return {f"{run} {name}": x for run, path in runs_of(folder) for name, x in kept_of_run(path).items()}


def facts_of_audit(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "audit.json").read_text())
    del document["created"], document["source"]["seconds"]
    return {"half-written": half_written(folder), "audit": document}


def kept_of_audit(folder: Path) -> dict[str, Any]:
    """Parts by name: what was read is not read again, so that its file stays the one it was."""
    return {p.name: p.stat().st_ino for p in folder.glob("parts/*.npz")}


def train_words(prepared: Path, out: Path) -> list[str]:
    return ["train", str(prepared / "run.toml"), "--out", str(out)]


SUBJECTS = {
    "train": Subject(recipe, train_words, ("--resume",), kept_of_run, facts_of_run),
    "sweep": Subject(
        sweep,
        lambda prepared, out: ["sweep", str(prepared / "sweep.toml"), "--out", str(out)],
        (),
        kept_of_sweep,
        facts_of_sweep,
        ended=lambda out: len(list(out.glob("runs/*/*/seed-*/arms/*/summary.json"))) == 4,
    ),
    "audit": Subject(
        log,
        lambda prepared, out: ["audit", str(prepared / "log"), "--out", str(out)],
        (),
        kept_of_audit,
        facts_of_audit,
    ),
    "pipeline": Subject(
        lambda folder: recipe(folder, pipeline=True), train_words, ("--resume",), kept_of_run, facts_of_run
    ),
}


# -- a recorder has no command: this loop is one

STEPS, FLUSH_EVERY = 300, 20


def record(folder: Path, journal: Path) -> None:
    """Record steps, as a training loop does; write down what the recorder has acknowledged."""
    import torch

    from offdrift.errors import RecordError
    from offdrift.records import recorder as records

    generator = torch.Generator().manual_seed(1)
    notes = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(what: str, step: int) -> None:
        os.write(notes, f"{what} {step}\n".encode())

    def insist(act: Callable[[], Any]) -> None:
        """What a loop does that would rather wait than lose something."""
        while True:
            try:
                return act()
            except RecordError as e:
                if "cannot write" not in str(e):
                    raise
                note("refused", 0)
                time.sleep(0.05)

    recorder = records.Recorder(folder, seconds=0.3)
    for step in range(STEPS):
        batch = batch_of(step, generator)
        insist(lambda batch=batch: records.record(recorder, **batch))
        note("added", step)
        if step % FLUSH_EVERY == FLUSH_EVERY - 1:
            insist(recorder.flush)
            note("flushed", step)
        time.sleep(0.004)
    insist(recorder.flush)
    recorder.close()


def steps_recorded(folder: Path) -> Counter[int]:
    """How many rows each step has; raises if a file is not whole."""
    count: Counter[int] = Counter()
    for file in folder.glob("*.parquet"):
        count.update(pq.read_table(file, columns=["step"]).column("step").to_pylist())
    return count


def record_trial(harm: str, strike: Strike, forge: Forge, base: Path, seconds: float) -> dict[str, Any]:
    """Strike a recorder; raises `AssertionError` if what it had acknowledged is not there."""
    folder, journal = base / "disk/out", base / "journal"
    folder.mkdir()
    forge.start(["--record", str(folder), str(journal)], base / "output")
    struck = strike(harm, forge, folder, seconds)
    if harm in ("full", "readonly"):
        time.sleep(strike.rng.uniform(0.1, 0.6))
        strike.mend(folder)
    status = forge.wait(60)
    notes = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    last = {what: max((int(n) for kind, n in notes if kind == what), default=-1) for what in ("added", "flushed")}
    expected = {"kill": -signal.SIGKILL, "term": -signal.SIGTERM}.get(harm, 0) if struck else 0
    # SIGTERM before there is a recorder, or after it was closed, is as in any other program.
    assert status == expected, f"status {status}, not {expected}: {(base / 'output').read_text()[-2000:]}"
    safe = last["flushed"] if harm == "kill" and struck else last["added"]
    count = steps_recorded(folder)
    lost = [step for step in range(safe + 1) if count[step] == 0]
    assert not lost, f"{lost[:5]} were acknowledged and are not there ({safe + 1} were)"
    assert set(count.values()) <= {64}, f"a step was written {max(count.values()) / 64:g} times"
    return {
        "struck": int(struck),
        "acknowledged": safe + 1,
        "given up": last["added"] + 1 - len(count) if harm == "kill" else 0,
        "refused": sum(kind == "refused" for kind, _ in notes),
    }


# -- strikes


@dataclass
class Strike:
    """Waits for a random moment and does one harm."""

    rng: random.Random
    filler: Path
    before: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        harm: str,
        forge: Forge,
        folder: Path,
        seconds: float,
        look: Callable[[], dict[str, Any]] = dict,
        ended: Callable[[Path], bool] = lambda out: False,
    ) -> bool:
        """Whether the command was still at work; `before` is what the folder acknowledged just before."""
        moment = self.rng.choice(("any", "while writing", "once acknowledged"))
        if moment == "once acknowledged":
            while not look():
                if forge.wait(0.02) is not None:
                    return False
            seconds = seconds / 2
        if forge.wait(self.rng.uniform(0.0, seconds)) is not None:
            return False
        if moment == "while writing":
            end = time.monotonic() + 1.0
            while time.monotonic() < end and not half_written(folder):
                if forge.wait(0.003) is not None:
                    return False
            if forge.wait(self.rng.uniform(0.0, 0.005)) is not None:
                return False
        # What is acknowledged after the look and before the strike may be there too: it is not compared.
        self.before = look()
        if ended(folder):
            return False
        if harm in ("kill", "term"):
            try:
                os.kill(forge.pid, signal.SIGKILL if harm == "kill" else signal.SIGTERM)
            except ProcessLookupError:
                return False
        else:
            {"full": self._fill, "readonly": self._forbid, "clock": self._jump}[harm](folder)
        return True

    def _fill(self, folder: Path) -> None:
        """Take what is free, and a little after it until nothing is."""
        with self.filler.open("wb", buffering=0) as f:
            for size in (1 << 20, 1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        f.write(b"\0" * size)

    def _forbid(self, folder: Path) -> None:
        for path in [folder, *folder.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o555 if path.is_dir() else 0o444)

    def _jump(self, folder: Path) -> None:
        by = self.rng.choice([-1, 1]) * self.rng.uniform(3600.0, 10 * 86400.0)
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (path.stat().st_atime + by, path.stat().st_mtime + by))

    def mend(self, folder: Path) -> None:
        self.filler.unlink(missing_ok=True)
        for path in [folder, *folder.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o755 if path.is_dir() else 0o644)


def trial(
    name: str, harm: str, strike: Strike, forge: Forge, base: Path, seconds: float, expected: dict[str, Any]
) -> dict[str, Any]:
    """Strike a command, run it again, compare; raises `AssertionError` saying what is wrong."""
    subject, out, output = SUBJECTS[name], base / "disk/out", base / "output"
    words = subject.words(base / name, out)
    out.mkdir()
    forge.start(words, output)
    children: list[psutil.Process] = []

    def look() -> dict[str, Any]:
        with contextlib.suppress(psutil.Error):
            children.extend(psutil.Process(forge.pid).children(recursive=True))
        return subject.kept(out)

    struck = strike(harm, forge, out, seconds, look, subject.ended)
    status = forge.wait(300)
    if not struck:
        return {"struck": 0}
    text = output.read_text() if output.exists() else ""
    allowed = {"kill": {-signal.SIGKILL}, "term": {subject.politely, -signal.SIGTERM}, "clock": {0}}
    assert status in allowed.get(harm, {0, 1}), f"status {status}: {text[-2000:]}"
    assert "Traceback" not in text, text[-3000:]
    if refused := status == 1:
        assert "cannot write" in text, text[-2000:]
    strike.mend(out)
    orphans = [p for p in psutil.wait_procs(children, timeout=30)[1] if p.status() != psutil.STATUS_ZOMBIE]
    agents = [p for p in orphans if "RolloutWorker" not in " ".join(p.cmdline())] if name == "pipeline" else []
    for orphan in orphans:
        orphan.kill()
    orphans = [p for p in orphans if p not in agents]  # agents of Ray look for a minute for the server that is gone
    assert not orphans, f"processes are left: {orphans}"
    kept = strike.before
    again = subject.again if (out / "run.json").exists() else ()
    forge.start([*words, *again], output)
    status = forge.wait(300)
    assert status == 0, f"run again, it ends with {status}: {output.read_text()[-3000:]}"
    now = subject.kept(out)
    lost = [key for key, value in kept.items() if now.get(key) != value]
    assert not lost, f"acknowledged and lost, or done again: {lost[:4]}"
    facts = subject.facts(out)
    assert not (left := facts["half-written"]), f"half-written files are left: {left[:4]}"
    other = [key for key in expected if facts.get(key) != expected[key]]
    assert set(facts) == set(expected), f"{set(facts) ^ set(expected)} is there once"
    assert not other, f"not as in a run that nobody struck: {other[:4]}"
    return {"struck": 1, "acknowledged": len(kept), "refused": int(refused)}


def campaign(
    subjects: list[str],
    harms: list[str],
    strikes: int,
    seed: int,
    base: Path,
    report: Callable[[str, list[dict[str, Any]]], None],
    earlier: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """So many strikes over subjects and harms in turn, after `earlier` ones; one that came too late is repeated."""
    modules = RECORDER if set(subjects) == {"record"} else IMPORTED
    forge = Forge(__file__, modules)
    trials = list(earlier)
    (base / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "offdrift", str(base / "disk")], check=True)
    try:
        expected: dict[str, dict[str, Any]] = {}
        seconds: dict[str, float] = {}
        for name in dict.fromkeys(subjects):
            (base / name).mkdir()
            out = base / "disk/out"
            if name == "record":
                out.mkdir()
                words = ["--record", str(out), str(base / "reference")]
            else:
                SUBJECTS[name].prepare(base / name)
                words = SUBJECTS[name].words(base / name, out)
            forge.start(words, base / "output")
            begin = time.monotonic()
            assert forge.wait(300) == 0, (base / "output").read_text()[-3000:]
            seconds[name] = time.monotonic() - begin
            expected[name] = {} if name == "record" else SUBJECTS[name].facts(out)
            shutil.rmtree(out)
            report(f"{name}: {seconds[name]:.1f} s when nobody strikes", [])
        done = sum(row.get("struck", 1) for row in trials)
        for i in itertools.count(len(trials)):
            if done >= strikes:
                break
            name = subjects[done % len(subjects)]
            harm = harms[(done // len(subjects) + done % len(subjects)) % len(harms)]
            # A generator per trial, so that one can be repeated by itself.
            strike = Strike(random.Random(f"{seed} {i}"), base / "disk/filler")
            row: dict[str, Any] = {"trial": i, "subject": name, "harm": harm, "commit": commit()}
            begin = time.monotonic()
            try:
                if name == "record":
                    row |= record_trial(harm, strike, forge, base, seconds[name])
                else:
                    row |= trial(name, harm, strike, forge, base, seconds[name], expected[name])
            except AssertionError as e:
                row["fault"] = f"{e}" or traceback.format_exc()[-300:]
            if row.get("struck") == 0:  # it was faster than the one that nobody struck: strike earlier
                seconds[name] = min(seconds[name], 0.85 * (time.monotonic() - begin))
            row["seconds"] = round(time.monotonic() - begin, 1)
            done += row.get("struck", 1)
            trials.append(row)
            report(json.dumps(row), trials)
            if forge.status is None:
                forge.close()
                forge = Forge(__file__, modules)
            strike.mend(base / "disk")
            shutil.rmtree(base / "disk/out", ignore_errors=True)
            for file in ("output", "journal"):
                (base / file).unlink(missing_ok=True)
    finally:
        forge.close()
        subprocess.run(["umount", "--lazy", str(base / "disk")], check=False)
    return trials


def commit() -> str:
    """The commit of the working tree, with a mark if files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def counted(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by subject and harm, and in all."""
    table: dict[str, Counter[str]] = {}
    for row in trials:
        for key in (f"{row['subject']} {row['harm']}", "all"):
            count = table.setdefault(key, Counter())
            count["trials"] += 1
            count["faults"] += "fault" in row
            for name in ("struck", "acknowledged", "refused", "given up"):
                count[name] += row.get(name, 0)
    return {key: dict(count) for key, count in sorted(table.items())}


def namespaced() -> None:
    """Run this script again in a mount namespace of its own, which takes its mounts with it when it ends."""
    if os.environ.get("OFFDRIFT_KILLS") == "namespaced":
        return
    for options in (["--mount"], ["--map-root-user", "--mount"]):
        if subprocess.run(["unshare", *options, "true"], capture_output=True).returncode == 0:
            os.environ["OFFDRIFT_KILLS"] = "namespaced"
            os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])
    sys.exit("this script mounts a small file system in a namespace of its own; `unshare --mount` is refused here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("record", *SUBJECTS)
    parser.add_argument("--strikes", type=int, default=200, help="in all, subjects and harms in turn")
    parser.add_argument(
        "--subjects", default=",".join(names), help=f"of {', '.join(names)}; twice: struck twice as often"
    )
    parser.add_argument("--harms", default=",".join(HARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subjects, harms = options.subjects.split(","), options.harms.split(",")
    if unknown := [*({*subjects} - {*names}), *({*harms} - {*HARMS})]:
        parser.error(f"unknown: {', '.join(unknown)}; subjects are {', '.join(names)}, harms {', '.join(HARMS)}")
    namespaced()
    from measure import machine

    earlier: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        stored = json.loads(options.json.read_text())
        if "trials" not in stored or stored["seed"] != options.seed:
            parser.error(f"{options.json} holds no campaign of --seed {options.seed}; name another file, or remove it")
        earlier = stored["trials"]

    def report(line: str, trials: list[dict[str, Any]]) -> None:
        print(line, flush=True)
        if options.json is not None and trials:  # after each, so that an interrupted campaign is one, too
            faults = [row for row in trials if "fault" in row]
            document = {"seed": options.seed, "counts": counted(trials), "faults": faults, "machine": about}
            rows = ",\n  ".join(json.dumps(row) for row in trials)
            head = json.dumps(document, indent=1).removesuffix("\n}")
            part = options.json.with_name(f".{options.json.name}.part")
            part.write_text(f'{head},\n "trials": [\n  {rows}\n ]\n}}\n')
            part.replace(options.json)

    about = machine("transformers")
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        trials = campaign(subjects, harms, options.strikes, options.seed, Path(folder), report, earlier)
    print(json.dumps(counted(trials), indent=1))
    sys.exit(any("fault" in row for row in trials))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        words = serve()
        if words is None:
            sys.exit(0)
        if words[0] == "--record":
            record(Path(words[1]), Path(words[2]))
            sys.exit(0)
        from offdrift.cli import main as offdrift

        sys.argv = ["offdrift", *words]
        offdrift()
        sys.exit(0)
    main()
