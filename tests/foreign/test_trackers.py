"""Three arms are three runs in W&B, MLflow and trackio, each ended, with project, group and settings: read in their own files."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests_lab.train.conftest import Digits, short_arms, small_recipe

from offdrift.records.readers.metrics import wandb_runs
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.loop.loop import train
from tests.foreign.real import REQUIRED

pytestmark = pytest.mark.foreign
ARMS = {"none": {"method": "none"}, "gspo": {"method": "gspo"}, "tis": {"method": "token_tis"}}
STEPS = [1, 2]
METRIC = "optim/grad_norm"


class Told(dict[str, Any]):
    """What a tracker holds of a run: project, group, method, steps, whether it ended."""


def of_wandb(folder: Path) -> dict[str, Told]:
    """Runs of W&B by name, from the records of their files."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for file in folder.glob("wandb/offline-run-*/run-*.wandb"):
        records = [Record.FromString(message) for message in wandb_runs._messages(str(file), [])]
        (run,) = [record.run for record in records if record.HasField("run")][:1]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        config |= {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for record in records
            if record.HasField("config")
            for item in record.config.update
        }
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        runs[run.display_name] = Told(
            project=run.project,
            group=run.run_group,
            method=config["arm.method"],
            steps=[row["_step"] for row in rows if METRIC in row],
            ended=any(record.HasField("exit") for record in records),
        )
    return runs


def of_mlflow(folder: Path) -> dict[str, Told]:
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = [found for found in client.search_experiments() if found.name != "Default"]
    return {
        run.data.tags["arm"]: Told(
            project=experiment.name,
            group=run.data.tags["group"],
            method=run.data.params["arm.method"],
            steps=sorted(metric.step for metric in client.get_metric_history(run.info.run_id, METRIC)),
            ended=run.info.status == "FINISHED",
        )
        for run in client.search_runs([experiment.experiment_id])
    }


def of_trackio(folder: Path) -> dict[str, Told]:
    """Runs of trackio's table, which exist there once the run has ended."""
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as table:
        configs = {name: json.loads(text) for name, text in table.execute("SELECT run_name, config FROM configs")}
        rows = list(table.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"))
    return {
        name.partition("/")[2]: Told(
            project=file.stem,
            group=config["_Group"],
            method=config["arm.method"],
            steps=[step for run, step, metrics in rows if run == name and METRIC in json.loads(metrics)],
            ended=True,
        )
        for name, config in configs.items()
    }


READ = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.parametrize("kind", READ)
def test_three_arms_are_three_runs_that_have_ended(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(kind) is None:
        message = f"{kind} is not installed; `make test-foreign` installs and runs it"
        (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(message)
    places = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri()}  # fmt: skip
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "digits", Digits())
    short_arms(monkeypatch)
    log = {"eval_every": 9, "eval_prompts": 2, "checkpoint_every": 9, "trackers": [kind], "tokens": False}
    with warnings.catch_warnings():  # of the tracker's own code
        warnings.simplefilter("ignore")
        train(small_recipe(arms=ARMS, batches=len(STEPS), log=log), tmp_path / "run-3")
        told = READ[kind](tmp_path)
    common = {"project": "small", "group": "run-3", "steps": STEPS, "ended": True}
    assert told == {arm: {**common, "method": row["method"]} for arm, row in ARMS.items()}
