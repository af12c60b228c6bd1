"""Settings of methods and schedules: typed by their field wherever they come from, refused by name otherwise."""

from dataclasses import is_dataclass

import pytest

from offdrift.adapters.base import Adapter, environ_settings
from offdrift.errors import MethodError, RecipeError
from offdrift.methods import METHODS, method, override
from offdrift.methods.describe import settings
from offdrift.setting import parse_setting, parse_settings
from offdrift_lab.schedules import SCHEDULES
from offdrift_lab.schedules import override as with_rules
from offdrift_lab.train.settings.recipe import load_recipe

WRONG = ("maybe", "", [], ["a", 1], {}, b"x", object(), float("nan"), 1j)
"""Values that no field of any part can have."""
EVERY = [(name, path) for name, row in METHODS.items() for path in settings(row)]


def test_every_setting_of_every_row_takes_its_own_value_back():
    for name, row in METHODS.items():
        assert override(row, settings(row)) == row, name
        text = ",".join(f"{k}={'none' if x is None else str(x).lower() if isinstance(x, bool) else x}" for k, x in settings(row).items())  # fmt: skip
        assert override(row, parse_settings(text)) == row, (name, text)


def test_no_setting_of_any_row_takes_what_it_cannot_have():
    for name, path in EVERY:
        for wrong in WRONG:
            if wrong == {}:  # a table without values changes nothing
                continue
            with pytest.raises(MethodError) as refused:
                override(method(name), {path: wrong})
            assert path.rpartition(".")[2] in str(refused.value), (name, path, wrong, refused.value)


def test_a_boolean_is_no_number_and_a_number_no_boolean():
    for name, path in EVERY:
        value = settings(method(name))[path]
        if isinstance(value, bool):
            wrong = (0, 1, 1.0, "False", "yes")
        elif isinstance(value, int | float):
            wrong = (True, "1")
        else:
            continue
        for x in wrong:
            with pytest.raises(MethodError, match="must be"):
                override(method(name), {path: x})


@pytest.mark.parametrize("text", ["false", " false ", "true"])
def test_the_environment_and_set_read_booleans_alike(monkeypatch, text):
    monkeypatch.setenv("OFFDRIFT_SETTINGS", f"weight.normalize={text}")
    wanted = text.strip() == "true"
    assert Adapter("token_tis", framework="plain", settings=environ_settings()).method.correction.weights[0].normalize is wanted  # fmt: skip
    recipe = load_recipe("recipes/tiny.toml", changes=["method=token_tis", f"override.weight.normalize={text}"])
    assert recipe.row("token_tis").correction.weights[0].normalize is wanted


@pytest.mark.parametrize("where", ["environment", "set", "adapter"])
@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("weight.normalize=maybe", "true or false"),
        ("weight.cap=big", "a number or none"),
        ("weight.cap=true", "a number or none"),
        ("weight.unit=word", "'token' or 'prefix'"),
        ("aggregate=nope", "'token_mean'"),
        ("advantage=nope", "'grpo'"),
        ("advantage=3", "text or none"),
    ],
)
def test_a_wrong_value_is_refused_with_setting_value_and_what_is_allowed(monkeypatch, where, setting, allowed):
    path, _, value = setting.partition("=")
    monkeypatch.setenv("OFFDRIFT_SETTINGS", setting)
    give = {
        "set": lambda: load_recipe("recipes/tiny.toml", changes=["method=token_tis", f"override.{setting}"]),
        "environment": lambda: Adapter("token_tis", framework="plain", settings=environ_settings()),
        "adapter": lambda: Adapter("token_tis", framework="plain", settings={path: parse_setting(value)}),
    }
    with pytest.raises((MethodError, RecipeError)) as refused:
        give[where]()
    assert path in str(refused.value)
    assert repr(parse_setting(value)) in str(refused.value)
    assert allowed in str(refused.value)


def test_intervals_are_lists_of_two_numbers():
    row = next(r for r in METHODS.values() if hasattr(r.objective, "eps_high_entropy"))
    changed = override(row, parse_settings("objective.eps_high_entropy=[0.1, 0.2],objective.eps_low=.3"))
    assert changed.objective.eps_high_entropy == (0.1, 0.2)
    assert changed.objective.eps_low == 0.3
    for wrong in ([0.1], [0.1, 0.2, 0.3], ["a", 0.2], 0.1):
        with pytest.raises(MethodError, match=r"eps_high_entropy = .*\[a number, a number\] or none"):
            override(row, {"objective.eps_high_entropy": wrong})


def test_no_rule_of_any_schedule_takes_what_it_cannot_have():
    from dataclasses import fields

    for name, row in SCHEDULES.items():
        for part in ("admission", "dispatch", "weights", "too_old", "consumption"):
            rule = getattr(row, part)
            assert is_dataclass(rule)
            for field in fields(rule):
                for wrong in (*WRONG, True, -1):
                    with pytest.raises(RecipeError, match=field.name):
                        with_rules(row, {f"{part}.{field.name}": wrong})
        for wrong in (*WRONG, True, -1, 1.5, None):
            with pytest.raises(RecipeError, match="sync_every"):
                with_rules(row, {"sync_every": wrong})
        assert name


def test_a_part_of_a_users_own_is_typed_by_its_annotations_or_passed_on():
    from dataclasses import dataclass, replace

    from offdrift.objectives import Reinforce

    @dataclass(frozen=True, kw_only=True)
    class Mine(Reinforce):
        strength: float = 1.0

    row = replace(method("token_is"), objective=Mine())
    assert override(row, {"objective.strength": 2}).objective.strength == 2.0
    with pytest.raises(MethodError, match=r"objective\.strength = 'x': must be a number"):
        override(row, {"objective.strength": "x"})
    with pytest.raises(MethodError, match=r"objective\.other.*strength"):
        override(row, {"objective.other": 2})
