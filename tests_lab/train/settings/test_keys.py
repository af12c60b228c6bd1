"""Typos in recipes and sweeps are refused before PyTorch is loaded, by a table that is the parts' own."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from offdrift.errors import RecipeError
from offdrift_lab.train.settings.keys import check_keys, parts
from offdrift_lab.train.settings.recipe import Recipe
from offdrift_lab.train.settings.sections import Section
from offdrift_lab.train.sweep.sweep import Sweep

ROOT = Path(__file__).parents[3]


def inside(kind: Any) -> type[Section] | None:
    """The part that an annotation holds."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next((found for x in get_args(kind) if (found := inside(x))), None)


def walk(part: type[Section], seen: set[type[Section]]) -> None:
    seen.add(part)
    read = parts()[part.__name__]
    assert read.keys() == {field.alias or name for name, field in part.model_fields.items()}, part
    for name, field in part.model_fields.items():
        of = inside(field.annotation)
        key = read[field.alias or name]
        assert key.part == (of.__name__ if of else None), (part, name)
        if of is not None and of not in seen:
            walk(of, seen)


def test_keys_are_those_of_the_parts():
    seen: set[type[Section]] = set()
    walk(Recipe, seen)
    walk(Sweep, seen)
    assert len(seen) > 20


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda file: file.stem)
def test_no_recipe_that_comes_with_the_package_is_refused(file):
    sweep = "\nrecipe = " in f"\n{file.read_text()}"
    check_keys(file, part="Sweep" if sweep else "Recipe")


@pytest.mark.parametrize("change", [
    "method=gspo", "override.objective.eps_high=0.3", "arms.none.override.gate.high=0.1", "pipeline={}",
    "lora.rank=4", "old_policy.from=sampling", "arms={a={method=\"none\"}}", "nonsense", "=4",
])  # fmt: skip
def test_settings_that_a_recipe_may_have_are_passed_on(change):
    check_keys(ROOT / "recipes" / "tiny.toml", [change])


@pytest.mark.parametrize(("change", "says"), [
    ("lag.sync_evry=4", r"unknown key 'lag.sync_evry', for instance sync_every; lag has sync_every"),
    ("rolout.dtype=float16", r"unknown key 'rolout', for instance rollout; a recipe has name, model"),
    ("arms.none.metod=grpo", r"unknown key 'arms.none.metod', for instance method; arms.none has method"),
    ("arms={a={override={x=1}, nope=2}}", r"unknown key 'arms.a.nope'"),
    ("rollout.kv={budgt=4}", r"unknown key 'rollout.kv.budgt', for instance budget"),
])  # fmt: skip
def test_an_unknown_setting_is_refused_with_those_that_there_are(change, says):
    with pytest.raises(RecipeError, match=says) as refused:
        check_keys(ROOT / "recipes" / "tiny.toml", [change])
    assert f"--set {change}" in str(refused.value)


@pytest.mark.parametrize(("part", "kind"), [("Recipe", "recipe"), ("Sweep", "sweep")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, part, kind):
    with pytest.raises(RecipeError, match=rf"cannot read {kind} .*nowhere.toml: .* is an example"):
        check_keys(tmp_path / "nowhere.toml", part=part)
    (tmp_path / "half.toml").write_text("name = ")
    with pytest.raises(RecipeError, match=r"half.toml is not valid TOML: "):
        check_keys(tmp_path / "half.toml", part=part)


COMMAND = """
import sys
from offdrift.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "pyarrow") if name in sys.modules])
"""


@pytest.mark.parametrize(("file", "words", "says"), [
    ("a.toml", ("train", "a.toml"), "a.toml: unknown key 'lag.sync_evry'"),
    ("b.toml", ("train", "tiny", "--set", "lag.sync_evry=4"), "--set lag.sync_evry=4: unknown key"),
    ("s.toml", ("sweep", "s.toml"), "s.toml: unknown key 'sedes', for instance seeds; a sweep has name"),
    ("t.toml", ("sweep", "t.toml"), "t.toml, [set]: unknown key 'lag.sync_evry'"),
    ("t.toml", ("sweep", "sweep", "--set", "lag.sync_evry=4"), "--set lag.sync_evry=4: unknown key"),
    ("", ("train", "tinny"), "cannot read recipe tinny"),
])  # fmt: skip
def test_the_command_refuses_before_torch_is_imported(tmp_path, file, words, says):
    tiny = (ROOT / "recipes" / "tiny.toml").read_text()
    texts = {
        "a.toml": tiny.replace("sync_every", "sync_evry"),
        "s.toml": 'name = "s"\nrecipe = "tiny"\nsedes = 2\n',
        "t.toml": 'name = "t"\nrecipe = "tiny"\n[set]\n"lag.sync_evry" = 2\n',
    }
    if file in texts:
        (tmp_path / file).write_text(texts[file])
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert says in " ".join(done.stderr.split()), done.stderr
    assert done.stdout.strip() == "[]"
