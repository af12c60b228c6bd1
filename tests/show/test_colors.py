"""The palettes, computed: enough contrast in both themes, and a scale that lightness alone orders."""

import re
from importlib.resources import files
from itertools import pairwise

import pytest

from offdrift.show.charts import SYMBOLS
from offdrift.show.numbers import KL_EDGES

CSS = (files("offdrift.show") / "assets" / "page.css").read_text("utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for block in re.findall(r":root \{(.*?)\n *\}", CSS, flags=re.DOTALL)
)
THEMES = pytest.mark.parametrize("theme", [LIGHT, {**LIGHT, **DARK}], ids=["light", "dark"])


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2.2), 0 for black to 1 for white."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(a: str, b: str) -> float:
    """Contrast ratio (WCAG 2.2), 1 to 21."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_follows_its_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_both_themes_define_the_same_colors() -> None:
    assert set(LIGHT) == set(DARK)
    assert {f"arm-{i}" for i in range(len(SYMBOLS))} <= set(LIGHT)
    assert {f"{c}{i}" for c in "kt" for i in range(len(KL_EDGES) + 1)} <= set(LIGHT)


@THEMES
def test_text_and_lines_can_be_read(theme: dict[str, str]) -> None:
    texts = [(ink, back) for ink in ("ink", "soft", "flag", "accent") for back in ("page", "card")]
    texts += [("flag", "flag-back"), ("good", "good-back")]
    texts += [(f"t{i}", f"k{i}") for i in range(len(KL_EDGES) + 1)]
    lines = [(f"arm-{i}", "card") for i in range(len(SYMBOLS))]
    assert (len(texts), len(lines)) == (20, 8)
    assert {pair: c for pair in texts if (c := contrast(theme[pair[0]], theme[pair[1]])) < 4.5} == {}
    assert {pair: c for pair in lines if (c := contrast(theme[pair[0]], theme[pair[1]])) < 3} == {}


@THEMES
def test_lightness_alone_orders_the_steps_of_kl(theme: dict[str, str]) -> None:
    steps = [luminance(theme[f"k{i}"]) ** (1 / 3) for i in range(len(KL_EDGES) + 1)]
    away = 1 if steps[-1] > steps[0] else -1
    assert all(away * (b - a) > 0.01 for a, b in pairwise(steps)), steps
