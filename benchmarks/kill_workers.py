"""Rollout workers and trainers killed at random points: what a run with [pipeline] keeps, and what it draws again.

    python benchmarks/kill_workers.py [--kills 50] [--trainer-kills 10] [--schedules areal,dora] [--json FILE]

A run is a process of its own: it trains a tiny model by one schedule, and writes a journal of the responses that have
finished, the groups that the trainer has taken and the checkpoints. This process sends SIGKILL, to a rollout worker or
to the trainer, which a new process then resumes. Every second trainer is killed while it writes a checkpoint. When a
run has ended, `check` holds its journal, its records and the weights that it published against each other.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch
from measure import machine
from safetensors.torch import load_file, save_file

from offdrift.engines.hf import TransformersEngine
from offdrift.models import load_model
from offdrift.records import store
from offdrift_lab.schedules import Key, schedule
from offdrift_lab.train.data import tasks
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.source import batch_seed
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.pipeline import source as pipeline_source
from offdrift_lab.train.pipeline.driver import Driver
from offdrift_lab.train.settings.recipe import Recipe, check_recipe

SCHEDULES = ("areal", "dora", "verl_partial", "one_step_off", "verl_stale")
PROMPTS, SAMPLES, MODEL = 4, 4, "tiny-qwen3"
PAUSE = 0.15
"""Seconds that the trainer rests after an update, so that workers are busy when they are killed."""
EXACT = 1e-4  # of the engines' contract, nats


# -- the run


@dataclass(frozen=True)
class Digits:
    """Prompts are sums; a completion earns the share of its characters that are digits, so that rewards differ."""

    name: str = "digits"

    def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
        draw = random.Random(f"{split} {seed}")
        return [Problem(f"{draw.randrange(10_000)}+{draw.randrange(10_000)}=", "0") for _ in range(n)]

    def reward(self, completion: str, problem: Problem) -> float:
        return sum(c.isdigit() for c in completion) / max(1, len(completion))


def recipe_of(name: str, updates: int) -> Recipe:
    """A run by one schedule."""
    content = {
        "name": "kills",
        "model": MODEL,
        "task": "digits",
        "batches": updates,
        "rollout": {"dtype": "float32", "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": 24},
        "pipeline": {"workers": 2, "cpus": 0.5, "slots": 12, "steps": 2, "hang_seconds": 60.0},
        "optim": {"lr": 1e-3},
        "log": {"eval_every": 10_000, "eval_prompts": 4, "checkpoint_every": 4, "samples_every": 1000, "trackers": []},
        "arms": {"arm": {"method": "token_tis", "schedule": name}},
    }
    return check_recipe(content, source="kill_workers")


class Journal(Driver):
    """A driver that writes down what has finished, what the trainer takes, and when a checkpoint is taken."""

    folder: Path
    """Of the run."""

    def start(self, weights: Any) -> dict[str, float]:
        number = len(list(self.folder.glob("journal-*.jsonl")))
        self._file = (self.folder / f"journal-{number:03d}.jsonl").open("a")
        self._write(begin=self.scheduler.version)
        return super().start(weights)

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _report(self, name: str, report: Any) -> None:
        super()._report(name, report)
        for text, end in zip(report.keys, report.ends):
            key = Key(*map(int, text.split(".")))
            drawn = self.groups.get(key.group, {}).get(key.sibling)
            if end in ("stop", "length") and drawn is not None and drawn.attempt == key.attempt:
                self._write(finished=key, tokens=tokens_of(drawn))

    def _hand_over(self, number: int) -> Any:
        group = super()._hand_over(number)
        keys = [Key(*map(int, drawn.job.key.split("."))) for drawn in group]
        self._write(taken=number, keys=keys, tokens=[tokens_of(drawn) for drawn in group])
        return group

    def _take_in(self, news: Any) -> None:
        if news.snapshot is not None:
            self._write(checkpoint=self.scheduler.version + 1)
        super()._take_in(news)

    def _lose(self, name: str, why: str) -> None:
        worker = self.scheduler.workers.get(name)
        self._write(lost=name, running=0 if worker is None else len(worker.running))
        super()._lose(name, why)


def tokens_of(drawn: Any) -> list[int]:
    return [token for delta in drawn.deltas for token in delta.tokens.tolist()]


def run(folder: Path, name: str, updates: int) -> None:
    """Train in this process, or go on; all published weights are kept by version."""
    tasks.TASKS["digits"] = Digits()  # type: ignore[assignment]
    torch.set_num_threads(1)
    Journal.folder = folder
    pipeline_source.Driver = Journal  # type: ignore[misc]
    publish, weights = pipeline_source.published, folder / "weights"
    weights.mkdir(exist_ok=True)

    def published(named: Any, version: int) -> Any:
        named = [(name, weight.detach().clone()) for name, weight in named]
        partial = weights / "partial"
        save_file(dict(named), partial)
        partial.replace(weights / f"{version}.safetensors")
        return publish(named, version)

    pipeline_source.published = published
    resume = (folder / "run.json").exists()

    def rest(event: Any) -> None:
        time.sleep(PAUSE * (event.kind == "update"))

    train(recipe_of(name, updates), folder, resume=resume, watch=rest)


# -- the killer


class Killer:
    """Starts a run again and again until it has ended, and kills.

    Args:
        workers, trainers: how many of each to kill at most.
    """

    def __init__(self, folder: Path, name: str, updates: int, rng: random.Random, *, workers: int, trainers: int):
        self.folder, self.rng, self.left = folder, rng, {"workers": workers, "trainers": trainers}
        self.command = [sys.executable, __file__, "--run", str(folder), "--schedules", name, "--updates", str(updates)]
        self.counts: Counter[str] = Counter()
        self.others: list[psutil.Process] = []  # that killed trainers had started

    def run(self) -> None:
        """Raises: `RuntimeError` with the end of the run's output if it fails by itself."""
        while True:
            with (self.folder / "output").open("w") as output:
                self.process = psutil.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)
                try:
                    killed = self._trainer() if self.left["trainers"] > 0 else self._workers()
                finally:
                    self._end()
            if not killed:
                break
        self.counts["processes of killed trainers"] += len(self.others)
        self._bereaved(self.others, seconds=100)  # agents of Ray look for a minute for the server that is gone
        if self.process.returncode:
            raise RuntimeError((self.folder / "output").read_text()[-3000:])

    def _workers(self) -> bool:
        """Kill workers until enough are, and let the run end."""
        while self.left["workers"] > 0 and self._sleeps(self.rng.uniform(0.1, 4.0)):
            victims = [p for p in self._processes() if named(p).startswith("ray::RolloutWorker")]
            if victims and self._journals():
                victim = self.rng.choice(victims)
                self.counts["of starting workers"] += "__init__" in named(victim)
                victim.kill()
                self.left["workers"] -= 1
                self.counts["worker kills"] += 1
        self.process.wait()
        return False

    def _trainer(self) -> bool:
        """Kill the trainer at a random point, or while it writes a checkpoint; whether it was there to be killed."""
        checkpoints = self.folder / "arms/arm/checkpoints"
        if self.left["trainers"] % 2:
            old = set(checkpoints.glob("*"))
            while self.process.poll() is None and not set(checkpoints.glob(".partial-*")) - old:
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0.0, 0.03))
        else:
            self._sleeps(self.rng.uniform(2.0, 30.0))
        if self.process.poll() is not None:
            return False
        others = self._processes()
        workers = [p for p in others if named(p).startswith("ray::RolloutWorker")]
        self.process.kill()
        self.process.wait()
        self.left["trainers"] -= 1
        self.counts["trainer kills"] += 1
        self.counts["within a checkpoint"] += any(checkpoints.glob(".partial-*"))
        self.counts["before the first batch"] += not self._journals()
        self._bereaved(workers, seconds=30)
        self.others += others
        return True

    def _bereaved(self, processes: list[psutil.Process], *, seconds: float) -> None:
        """Count the processes of killed trainers that are left after so many seconds, and end them."""
        self.counts["orphans"] += 0
        for orphan in psutil.wait_procs(processes, timeout=seconds)[1]:
            if state(orphan) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):  # ended, whether or not init noticed
                self.counts["orphans"] += 1
                print(f"{seconds:g} s after its trainer was killed there is still: {named(orphan).strip()}", flush=True)
                orphan.kill()

    def _end(self) -> None:
        """Leave nothing behind, whatever happens here."""
        if self.process.poll() is None:
            others = self._processes()
            self.process.kill()
            self.process.wait()
            for other in psutil.wait_procs(others, timeout=10)[1]:
                other.kill()

    def _journals(self) -> bool:
        return any(self.folder.glob("journal-*.jsonl"))

    def _sleeps(self, seconds: float) -> bool:
        """Wait so long; whether the run is still there."""
        try:
            self.process.wait(seconds)
        except psutil.TimeoutExpired:
            return True
        return False

    def _processes(self) -> list[psutil.Process]:
        """What the run has started."""
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def named(process: psutil.Process) -> str:
    """What a process calls itself."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def state(process: psutil.Process) -> str:
    """What the kernel says of a process."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


# -- the check


def effective(journals: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines that count: what a trainer did after the checkpoint that the next one began with does not."""
    lines: list[dict[str, Any]] = []
    for own in journals:
        begin = own[0]["begin"]
        ends = [i for i, line in enumerate(lines) if line.get("checkpoint") == begin]
        assert ends or not begin, f"a trainer began with checkpoint {begin}, which none has taken"
        lines = lines[: ends[-1] + 1] if begin else []
        lines += own[1:]
    return lines


def check(lines: list[dict[str, Any]], *, updates: int, schedule_name: str) -> dict[str, int]:
    """Every group trained on once, nothing that had finished drawn a second time or lost; how much was compared.

    Raises: `AssertionError` saying what is wrong.
    """
    row = schedule(schedule_name)
    taken = {line["taken"]: line for line in lines if "taken" in line}
    assert len(taken) == sum("taken" in line for line in lines), "a group was trained on twice"
    assert len(taken) == updates * PROMPTS, f"{len(taken)} groups were trained on, not {updates * PROMPTS}"
    if row.too_old.action != "drop":
        assert set(taken) == set(range(updates * PROMPTS)), "a group was left out, and another took its place"
    if not row.selects:
        for i, numbers in enumerate(batched(list(taken), PROMPTS)):
            assert set(numbers) == set(range(i * PROMPTS, (i + 1) * PROMPTS)), f"batch {i} has other groups"
    finished: dict[Key, list[int]] = {}
    for line in lines:
        if "finished" in line:
            key = Key(*line["finished"])
            assert key not in finished, f"{key} had finished and was drawn again"
            finished[key] = line["tokens"]
    used = {Key(*key): t for line in taken.values() for key, t in zip(line["keys"], line["tokens"], strict=True)}
    assert len(used) == len(taken) * SAMPLES, "a group is not whole"
    assert all(finished[key] == tokens for key, tokens in used.items()), "what was trained on is not what had finished"
    again = row.too_old.action in ("drop", "redraw")
    lost = [key for key in finished if key not in used and not again]
    assert not lost, f"{lost[:3]} had finished and were lost"
    return {
        "groups": len(taken),
        "responses": len(used),
        "lost workers": sum("lost" in line for line in lines),
        "responses in progress on them": sum(line.get("running", 0) for line in lines),
    }


def check_records(folder: Path, lines: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """By batch: prompts are those of the groups, versions never fall, and log-probs are those of the versions."""
    engine, tokenizer = TransformersEngine(load_model(MODEL, seed=0)[0], batch_size=64), load_model(MODEL, seed=0)[1]
    taken = [line for line in lines if "taken" in line]
    seed = recipe_of("areal", 1).seed

    def scored(rollouts: Any, version: int) -> torch.Tensor:
        engine.load_weights(load_file(folder / f"weights/{version}.safetensors").items(), version=version)
        return (engine.rescore(rollouts).logp_rollout - rollouts.logp_rollout).abs()

    for index, groups in enumerate(batched(taken, PROMPTS)):
        rollouts = store.read(folder / f"arms/arm/rollouts/batch-{index:06d}.parquet")
        lengths = rollouts.lengths.tolist()
        assert [t for line in groups for t in line["tokens"]] == [x.tolist() for x in rollouts.tokens.split(lengths)]
        problems = [Digits().sample(PROMPTS, seed=batch_seed(seed, line["taken"] // PROMPTS)) for line in groups]
        prompts = [of[line["taken"] % PROMPTS].prompt for of, line in zip(problems, groups)]
        assert list(rollouts.prompts) == [p for p in prompts for _ in range(SAMPLES)], f"batch {index}: other prompts"
        assert [tokenizer.decode(p) for p in rollouts.prompt_tokens.split(rollouts.prompt_cu_seqlens.diff().tolist())]
        versions = [v.tolist() for v in rollouts.rollout_version.split(lengths)]
        assert all(a <= b for own in versions for a, b in pairwise(own)), f"batch {index}: a version falls"
        gap, other = torch.zeros(len(rollouts.tokens)), torch.zeros(len(rollouts.tokens))
        for version in rollouts.rollout_version.unique().tolist():
            of_version = rollouts.rollout_version == version
            gap[of_version] = scored(rollouts, version)[of_version]
            if version:
                other[of_version] = scored(rollouts, 0)[of_version]
        yield {
            "gap": float(gap.max()),
            "other": float(other.max()),
            "mixed": sum(len(set(own)) > 1 for own in versions),
        }


def batched(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Consecutive parts of a list."""
    return (items[i : i + size] for i in range(0, len(items), size))


def journals(folder: Path) -> list[list[dict[str, Any]]]:
    """What every process of a run has written; a line that a kill cut off is dropped."""
    texts = [path.read_text() for path in sorted(folder.glob("journal-*.jsonl"))]
    return [[json.loads(line) for line in text[: text.rindex("\n") + 1].splitlines()] for text in texts if "\n" in text]


def one_run(name: str, rng: random.Random, *, updates: int, workers: int = 0, trainers: int = 0) -> dict[str, Any]:
    """A run by one schedule in which so many are killed, and what became of it.

    Raises: `AssertionError` or `RuntimeError` if it is not as it should be.
    """
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        killer = Killer(folder, name, updates, rng, workers=workers, trainers=trainers)
        killer.run()
        lines = effective(journals(folder))
        counts = check(lines, updates=updates, schedule_name=name)
        records = list(check_records(folder, lines))
    gap, other = (max(row[x] for row in records) for x in ("gap", "other"))
    assert gap < EXACT, f"a log-prob is {gap} nats from that of the version it is recorded with"
    assert other > 100 * EXACT, f"versions differ by {other} nats only, so that a wrong one would not be seen"
    mixed = int(sum(row["mixed"] for row in records))
    return {
        "schedule": name,
        "updates": updates,
        **killer.counts,
        **counts,
        "responses of several versions": mixed,
        "largest gap, nats": gap,
        "largest gap at version 0, nats": other,
    }


def stress(
    names: list[str], *, kills: int, trainer_kills: int, seed: int, updates: int = 40, per_run: int = 5
) -> list[dict[str, Any]]:
    """Runs of these schedules in turn, until so many workers and so many trainers have been killed."""
    rng, runs = random.Random(seed), []
    done: Counter[str] = Counter()
    for what, wanted, role in (("worker kills", kills, "workers"), ("trainer kills", trainer_kills, "trainers")):
        while done[what] < wanted:
            name = names[len(runs) % len(names)]
            result = one_run(name, rng, updates=updates, **{role: min(per_run, wanted - done[what])})
            done[what] += result.get(what, 0)
            runs.append(result)
            print(json.dumps(result), flush=True)
    return runs


def summed(runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of all runs, and the largest gaps."""
    total: dict[str, Any] = {"runs": len(runs)}
    for name in dict.fromkeys(name for row in runs for name in row if name != "schedule"):
        values = [row[name] for row in runs if name in row]
        total[name] = max(values) if "gap" in name else sum(values)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="workers to kill")
    parser.add_argument("--trainer-kills", type=int, default=0, help="trainers to kill")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--updates", type=int, default=40, help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.schedules.split(",")
    if options.run is not None:
        run(options.run, names[0], options.updates)
        return
    runs = stress(
        names, kills=options.kills, trainer_kills=options.trainer_kills, seed=options.seed, updates=options.updates
    )
    document = {"total": summed(runs), "runs": runs, "machine": machine("ray", "transformers")}
    print(json.dumps(document["total"], indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
