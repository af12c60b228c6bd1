"""A stored run: its folder, read back for the report.

An arm that is still running has no summary yet and may end in half a line; keys may be missing, null
or unknown; a resumed run has written some updates twice. None of that is an error: absent numbers stay
absent, and a line that cannot be read is skipped and counted. Only a folder without a run is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offdrift.errors import RecordError
from offdrift.show.json_access import number

FORMAT = 1
"""The layout of run folders that this reader knows."""

Row = Mapping[str, object]

LIVE_SUMMARY: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "reward_train_last": ("reward/mean", lambda v: v[-1]),
    "kl_mean": ("divergence/kl_rollout_current_mean", lambda v: sum(v) / len(v)),
    "kl_max": ("divergence/kl_rollout_current_max", max),
    "acceptance": ("gate/acceptance_seq", lambda v: sum(v) / len(v)),
    "ess_frac": ("full/ess_frac", lambda v: sum(v) / len(v)),
    "bound": ("certificate/kl_seq", lambda v: sum(v) / len(v)),
    "falsified_updates": ("certificate/falsified", sum),
    "log_ppl_gap": ("full/log_ppl_gap", lambda v: sum(v) / len(v)),
    "tokens_per_s": ("throughput/tokens_per_s", lambda v: sum(v) / len(v)),
}
"""How the summary of an arm that is still running follows from its metrics so far."""


@dataclass(frozen=True)
class Sample:
    """One stored rollout; every per-token list is as long as `tokens`, None where unknown."""

    update: int | None
    prompt: str
    reward: float | None
    accepted: bool | None
    finish: str
    tokens: tuple[str, ...]
    kl: tuple[float | None, ...]
    tv: tuple[float | None, ...]
    logp_rollout: tuple[float | None, ...]
    weight: tuple[float | None, ...]

    @property
    def kl_max(self) -> float:
        """Largest stored KL of a token (nats); 0 where none is stored."""
        return max((v for v in self.kl if v is not None), default=0.0)


@dataclass(frozen=True)
class Arm:
    """One arm of a run: its summary, and the rows it wrote, in order of update."""

    name: str
    finished: bool
    summary: Row = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    samples: tuple[Sample, ...] = ()
    skipped_lines: int = 0
    """Lines inside a file that were not JSON objects (a half-written last one is not counted)."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Updates at which a metric was recorded, and its finite values there."""
        return _points(self.metrics, key)

    def held_out(self) -> tuple[list[int], list[float]]:
        """Updates at which the policy was evaluated, and the mean reward there."""
        return _points(self.evals, "reward")

    def figure(self, key: str) -> float | None:
        """A number of the summary, None if it is absent."""
        return number(self.summary.get(key))

    def label(self, key: str) -> str:
        """A text of the summary, empty if it is absent."""
        value = self.summary.get(key)
        return "" if value is None else str(value)

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""
        last = number(self.metrics[-1]["update"]) if self.metrics else None
        return int(self.figure("updates") or last or 0)

    @property
    def proved(self) -> tuple[int, str] | None:
        """The latest update whose batch was new to the policy, and what its certificate says."""
        for row in reversed(self.metrics):
            words, update = row.get("certificate/verdict"), number(row.get("update"))
            if isinstance(words, str) and update is not None and row.get("certificate/fresh"):
                return int(update), words
        return None

    @property
    def certificates(self) -> int:
        """How many batches that were new to the policy have a certificate: as many looks."""
        fresh = [row for row in self.metrics if row.get("certificate/fresh")]
        return sum(isinstance(row.get("certificate/verdict"), str) for row in fresh)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know."""
        stored = self.summary.get("notes")
        notes = tuple(map(str, stored)) if isinstance(stored, list) else ()
        if self.skipped_lines:
            plural = "line was" if self.skipped_lines == 1 else "lines were"
            notes += (f"{self.skipped_lines} unreadable {plural} skipped in its files",)
        return notes


@dataclass(frozen=True)
class Run:
    """A training run: what was asked for, with which software, and its arms."""

    name: str
    recipe: Row
    started: str
    seconds: float | None
    versions: Row
    model: Row
    arms: tuple[Arm, ...]


def read_run(run_dir: Path) -> Run:
    """Everything that a run has stored so far.

    Args:
        run_dir: folder with `run.json` and one folder per arm under `arms/`.

    Raises: `RecordError` if the folder holds no readable `run.json` of format 1.
    """
    head = _read_head(run_dir / "run.json")
    table = {str(row["arm"]): row for row in _list(head.get("table")) if _dict(row) and row.get("arm")}
    folders = sorted(p for p in (run_dir / "arms").glob("*") if p.is_dir())
    arms = [_read_arm(folder, table) for folder in folders]
    without_folder = table.keys() - {arm.name for arm in arms}
    arms += [Arm(name, finished=True, summary=table[name]) for name in without_folder]
    planned = _dict(_dict(head.get("recipe")).get("arms"))  # in this order they run
    order = {name: i for i, name in enumerate({**planned, **table})}
    return Run(
        name=str(head.get("name") or run_dir.name),
        recipe=_dict(head.get("recipe")),
        started=str(head.get("started") or ""),
        seconds=number(head.get("seconds")),
        versions=_dict(head.get("versions")),
        model=_dict(head.get("model")),
        arms=tuple(sorted(arms, key=lambda arm: order.get(arm.name, len(order)))),
    )


def _read_head(path: Path) -> Row:
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(
            f"{path.parent} holds no run.json, so it is not a run folder; "
            "give the folder that training printed at its end"
        ) from None
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}); restore it, or train again") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        stored = head.get("format") if isinstance(head, dict) else type(head).__name__
        raise RecordError(
            f"{path} has format {stored!r}, this version reads format {FORMAT}; "
            "rebuild the report with the version that trained"
        )
    return head


def _read_arm(folder: Path, table: Mapping[str, Row]) -> Arm:
    metrics, bad_metrics = _read_lines(folder / "metrics.jsonl")
    evals, bad_evals = _read_lines(folder / "eval.jsonl")
    samples, bad_samples = _read_lines(folder / "samples.jsonl")
    summary: Row = {}
    with suppress(FileNotFoundError, ValueError):  # not written yet, or being written
        summary = _dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    summary = summary or table.get(folder.name, {})
    metrics, evals = _by_update(metrics), _by_update(evals)
    return Arm(
        name=str(summary.get("arm") or folder.name),
        finished=bool(summary),
        summary=summary or _live_summary(metrics, evals),
        metrics=metrics,
        evals=evals,
        samples=tuple(_sample(row) for row in samples),
        skipped_lines=bad_metrics + bad_evals + bad_samples,
    )


def _read_lines(path: Path) -> tuple[list[Row], int]:
    """The JSON objects of a file and how many lines before the last were not one."""
    if not path.is_file():
        return [], 0
    # Split on \n alone: str.splitlines would also cut a text at a raw U+2028.
    lines = [line for line in path.read_text("utf-8", "replace").split("\n") if line.strip()]
    rows, bad = [], 0
    for position, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif position < len(lines) - 1:
            bad += 1
    return rows, bad


def _by_update(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows in order of update; of an update that was written twice, the later row."""
    latest = {update: row for row in rows if (update := number(row.get("update"))) is not None}
    return tuple(latest[update] for update in sorted(latest))


def _live_summary(metrics: tuple[Row, ...], evals: tuple[Row, ...]) -> Row:
    rewards = _points(evals, "reward")[1]
    live: dict[str, object] = {}
    if rewards:
        live |= {"reward_before": rewards[0], "reward_after": rewards[-1]}
    for name, (key, reduce) in LIVE_SUMMARY.items():
        values = _points(metrics, key)[1]
        if values:
            live[name] = reduce(values)
    return live


def _sample(row: Row) -> Sample:
    tokens = tuple(map(str, _list(row.get("tokens"))))

    def per_token(key: str) -> tuple[float | None, ...]:
        values = [number(v) for v in _list(row.get(key))][: len(tokens)]
        return tuple(values + [None] * (len(tokens) - len(values)))

    accepted, update = row.get("accepted"), number(row.get("update"))
    return Sample(
        update=None if update is None else int(update),
        prompt=str(row.get("prompt") or ""),
        reward=number(row.get("reward")),
        accepted=accepted if isinstance(accepted, bool) else None,
        finish=str(row.get("finish") or ""),
        tokens=tokens,
        kl=per_token("kl"),
        tv=per_token("tv"),
        logp_rollout=per_token("logp_rollout"),
        weight=per_token("weight"),
    )


def _points(rows: Iterable[Row], key: str) -> tuple[list[int], list[float]]:
    pairs = [(int(number(r["update"]) or 0), v) for r in rows if (v := number(r.get(key))) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list:
    return value if isinstance(value, list) else []
