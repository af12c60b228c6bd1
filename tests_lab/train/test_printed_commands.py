"""Every command that the product or its documentation prints with --set changes what the arms do that it trains."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.command import command

from offdrift.errors import RecipeError
from offdrift.methods.table import METHODS, SYSTEMS
from offdrift.show.method_table import find
from offdrift_lab.schedules import SCHEDULES, schedule
from offdrift_lab.train.settings.recipe import Recipe, load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = {"NAME": "gspo", "ROW": "float16", "COLUMN": "bfloat16"}
OF_ARMS = {"arms", "old_policy", "replay", "fusion", "quantized"}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def documented() -> list[str]:
    """Commands with --set in pages, examples and evidence, each on one line."""
    commands = []
    for file in TEXTS:
        text = file.read_text(encoding="utf-8").replace(r"\_", "_")
        for match in re.finditer(r"(?:offdrift|-m offdrift) (?=(?:train|sweep) )", text):
            rest, inline = text[match.end() :], text[: match.start()].rpartition("\n")[2].count("`") % 2 == 1
            commands.append(rest.partition("`")[0] if inline else re.match(r"(?:[^\n]*\\\n)*[^\n]*", rest)[0])
    for claim in tomllib.loads((ROOT / "docs/evidence.toml").read_text(encoding="utf-8"))["claim"]:
        commands += [x.removeprefix("offdrift ") for x in claim.get("command", ()) if x.startswith("offdrift ")]
    for file in sorted((ROOT / "recipes").glob("*.toml")):
        commands += re.findall(r"^#.*offdrift ((?:train|sweep) .*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    commands = [" ".join(x.replace("\\\n", " ").split()) for x in commands]
    return sorted({x for x in commands if "--set" in x and x.split()[0] in ("train", "sweep")})


def parsed(words: str) -> tuple[str, Path, list[str], list[str] | None]:
    """Subcommand, file, what is set, and the arms of a command."""
    subcommand, file, *rest = shlex.split(words, comments=True)
    changes, arms = [], None
    for flag, value in itertools.pairwise(rest):
        if flag == "--set":
            key, _, value = value.partition("=")
            changes.append(f"{key}={PLACEHOLDERS.get(value, value)}")
        arms = value.split(",") if flag == "--arms" else arms
    return subcommand, Path(file), changes, arms


def behavior(recipe: Recipe, arm: str) -> dict[str, Any]:
    """All that decides what an arm does."""
    common = recipe.model_dump(exclude=OF_ARMS | {"pipeline"})
    piped = recipe.pipeline is not None
    return common | {
        "method": recipe.row(arm),
        "old_policy": recipe.old_policy_of(arm) if recipe.reads_old(arm) else None,
        "replay": recipe.replay_of(arm),
        "quantized": recipe.quantized_of(arm),
        "fusion": recipe.mixture_of(arm),
        "teacher": recipe.fusion and recipe.fusion.teacher,
        "schedule": recipe.schedule_of(arm) if piped else None,
        "pipeline": recipe.pipeline.model_dump(exclude={"schedule", "rules"}) if piped else None,
    }


def check_train(file: Path, changes: list[str], arms: list[str] | None) -> Recipe:
    """Each change, left out of the command, leaves the chosen arms doing something else, or is what the recipe has."""

    def behaviors(changes: list[str], stored: dict[str, Any] | None = None) -> dict[str, Any]:
        recipe = load_recipe(file, changes=changes, arms=arms, stored=stored)
        return {name: behavior(recipe, name) for name in recipe.arms if arms is None or name in arms}

    made = behaviors(changes)
    assert set(made) >= set(arms or ())
    for i, change in enumerate(changes):
        try:
            without = behaviors(changes[:i] + changes[i + 1 :], {})
        except RecipeError:
            continue  # the others need it
        assert made != without or change in AS_IT_IS, f"{change} changes nothing"
    return load_recipe(file, changes=changes, arms=arms)


AS_IT_IS = {"pipeline.schedule=one_step_off", "rollout.dtype=float32", "arms.trm_max.replay={support=true}"}
"""Said though it is the default."""


@pytest.mark.parametrize("words", documented())
def test_a_documented_command_does_what_it_sets(words):
    subcommand, file, changes, arms = parsed(words)
    assert changes
    if subcommand == "train":
        check_train(file, changes, arms)
        return
    made = load_sweep(file, changes=changes).cells
    for i in range(len(changes)):
        without = load_sweep(file, changes=changes[:i] + changes[i + 1 :]).cells
        pairs = list(zip(made, without, strict=True))
        assert any(behavior(a.recipe, a.setting.arm) != behavior(b.recipe, b.setting.arm) for a, b in pairs), changes[i]


def test_the_documentation_has_commands_with_settings():
    assert len(documented()) >= 15


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_command_of_a_schedule_trains_with_it(monkeypatch, capsys, name):
    printed = partial(command, monkeypatch, capsys)("schedules", name, width=200).stderr
    (words,) = re.findall(r"offdrift (train recipes/async.toml --set \S+ --set \S+)", printed)
    _, file, changes, arms = parsed(words)
    made = check_train(file, changes, arms)
    assert [made.schedule_of(arm) for arm in made.arms] == [schedule(name)]


@pytest.mark.parametrize("name", [*METHODS, *SYSTEMS])
def test_the_command_of_a_method_or_system_does_what_it_sets(name):
    printed = find(name)["command"]
    if not printed:
        assert name in SYSTEMS
        return
    _, file, changes, arms = parsed(printed.removeprefix("offdrift "))
    for_j = find(name).get("for_j") or ()
    check_train(file, [*changes, *for_j], arms)


@pytest.mark.parametrize(
    ("changes", "arms", "says"),
    [
        (["pipeline.schedule=areal"], None, r"pipeline.schedule = \"areal\" does nothing"),
        (["pipeline.schedule=one_step_off"], ["stale"], r"arms.stale has one of its own"),
    ],
)
def test_a_schedule_that_no_chosen_arm_reads_is_refused(changes, arms, says):
    with pytest.raises(RecipeError, match=says):
        load_recipe("recipes/async.toml", changes=changes, arms=arms)
