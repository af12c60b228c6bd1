"""Each arm has a tracker of its own, which has its rows alone and ends with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from offdrift_lab.train.loop.context import set_up
from offdrift_lab.train.loop.loop import train, train_arm
from offdrift_lab.train.loop.run_folder import ArmFolder, RunFolder
from offdrift_lab.train.loop.trackers import OPTIONS, Labels, close_trackers, open_trackers, settings_of
from offdrift_lab.train.settings.recipe import Recipe
from tests_lab.train.conftest import short_arms, small_recipe

ARMS = {"none": {"method": "none"}, "gspo": {"method": "gspo"}, "tis": {"method": "token_tis"}}


def recipe(batches: int = 2) -> Recipe:
    log = {"eval_every": 9, "eval_prompts": 2, "checkpoint_every": 1, "trackers": ["tensorboard"], "tokens": False}
    return small_recipe(arms=ARMS, batches=batches, log=log, lag={"sync_every": 1})


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What the arms of several tests share."""
    with pytest.MonkeyPatch.context() as patch:
        short_arms(patch)
        yield set_up(recipe(), RunFolder(tmp_path_factory.mktemp("run")), lambda event: None)


def scalars(file) -> tuple[EventAccumulator, list[int]]:
    events = EventAccumulator(str(file))
    events.Reload()
    return events, [event.step for event in events.Scalars("optim/loss")]


def test_three_arms_have_three_files_with_their_own_rows(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    train(recipe(), tmp_path)
    files = sorted(tmp_path.rglob("events.out.tfevents*"))
    assert [file.parent for file in files] == [tmp_path / "trackers" / arm for arm in sorted(ARMS)]
    for file, arm in zip(files, sorted(ARMS), strict=True):
        events, steps = scalars(file)
        rows = ArmFolder(tmp_path / "arms" / arm).rows("metrics")
        assert steps == [row["update"] for row in rows] == [1, 2]
        logged = [event.value for event in events.Scalars("optim/grad_norm")]
        assert logged == pytest.approx([row["optim/grad_norm"] for row in rows])
        text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
        assert json.loads(text.strip("`json\n"))["arm.method"] == ARMS[arm]["method"]


def test_an_arm_that_goes_on_replaces_the_rows_behind_its_checkpoint(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    run = set_up(recipe(4), RunFolder(tmp_path), lambda event: None)

    def stop(event):
        if event.kind == "update" and event.step == 3:
            raise KeyboardInterrupt

    run.watch = stop
    with pytest.raises(KeyboardInterrupt):
        train_arm(run, "none", resume=False)
    assert run.accelerator.trackers == []
    run.watch = lambda event: None
    train_arm(run, "none", resume=True)
    assert scalars(tmp_path / "trackers" / "none")[1] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind != "tensorboard"])
def test_other_trackers_get_project_group_name_settings_and_tags(shared, tmp_path, monkeypatch, kind):
    opened = []

    class Noted(GeneralTracker):
        name, requires_logging_directory = kind, False

        def __init__(self, project, **options):
            super().__init__()
            self.project, self.options, self.rows, self.ended = project, options, [], 0
            opened.append(self)

        tracker = property(lambda self: self)

        def start(self):
            pass

        def store_init_configuration(self, values):
            self.settings = values

        def log(self, values, step=None, **options):
            self.rows.append(step)

        def finish(self):
            self.ended += 1

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind, Noted)
    run = replace(shared, folder=RunFolder(tmp_path / "run-3"))
    monkeypatch.setattr(run.accelerator, "log_with", [kind])
    for arm in ARMS:
        train_arm(run, arm, resume=False)
    assert len(opened) == 3
    for arm, tracker in zip(ARMS, opened, strict=True):
        assert (tracker.project, tracker.rows, tracker.ended) == ("small", [1, 2], 1)
        assert tracker.settings["arm.method"] == ARMS[arm]["method"]
        words = json.dumps(tracker.options)
        assert "run-3" in words
        assert arm in words
    if kind == "wandb":
        assert opened[1].options == {"group": "run-3", "name": "gspo", "tags": ["offdrift", "gspo", "gspo"]}


def test_settings_are_the_arms_own():
    settings = settings_of(recipe(), "gspo")
    assert settings["arm.name"] == "gspo"
    assert settings["optim.lr"] == 2e-4
    assert not any(key.startswith("arms.") for key in settings)
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())


def test_a_tracker_that_is_open_already_is_used_as_it_is(shared, monkeypatch):
    class Own(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def __init__(self):
            super().__init__(_blank=True)

    own = Own()
    monkeypatch.setattr(shared.accelerator, "log_with", [own])
    open_trackers(shared.accelerator, shared.recipe, Labels("run", "none", "none", 0))
    assert shared.accelerator.trackers == [own]
    monkeypatch.setattr(Own, "finish", lambda self: None)
    close_trackers(shared.accelerator)
    assert shared.accelerator.trackers == []
