"""The palettes, computed: enough contrast in both themes, and a scale that lightness alone orders."""

import math
import re
from importlib.resources import files
from itertools import combinations, pairwise

import pytest

from offdrift.show.charts import NUM_COLORS, SYMBOLS, symbol_of
from offdrift.show.numbers import KL_EDGES

CSS = "\n".join((files("offdrift.show") / "assets" / file).read_text("utf-8") for file in ("page.css", "views.css"))
FOUND = re.findall(r":root(?::not\(\.paper\))? \{(.*?)\n *\}", CSS, flags=re.DOTALL)
BLOCKS = [block for block in FOUND if re.search(r"--[\w-]+: #", block)]
LIGHT, DARK = (
    {name: color for block in blocks for name, color in re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)}
    for blocks in (BLOCKS[::2], BLOCKS[1::2])
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
    assert len(BLOCKS) == 4
    assert set(LIGHT) == set(DARK)
    assert {f"arm-{i}" for i in range(len(SYMBOLS))} <= set(LIGHT)
    assert {f"{c}{i}" for c in "kt" for i in range(len(KL_EDGES) + 1)} <= set(LIGHT)


@THEMES
def test_text_and_lines_can_be_read(theme: dict[str, str]) -> None:
    texts = [(ink, back) for ink in ("ink", "soft", "flag", "accent", "good") for back in ("page", "card")]
    texts += [(level, f"{level}-back") for level in ("flag", "good", "stop", "act", "watch")]
    texts += [(level, "card") for level in ("stop", "act", "watch")]
    texts += [("ink", "good-back"), ("soft", "good-back"), ("card", "accent"), ("page", "ink")]
    texts += [(f"t{i}", f"k{i}") for i in range(len(KL_EDGES) + 1)]
    texts += [(f"{sign}{i}-ink", f"{sign}{i}") for sign in "np" for i in range(1, 6)]
    lines = [(f"arm-{i}", back) for i in range(len(SYMBOLS)) for back in ("card", "page")]
    lines += [("accent", back) for back in ("page", "card")]  # the ring around what has the focus
    assert (len(texts), len(lines)) == (42, 18)
    assert {pair: c for pair in texts if (c := contrast(theme[pair[0]], theme[pair[1]])) < 4.5} == {}
    assert {pair: c for pair in lines if (c := contrast(theme[pair[0]], theme[pair[1]])) < 3} == {}


@THEMES
def test_lightness_alone_orders_the_steps_of_kl(theme: dict[str, str]) -> None:
    steps = [luminance(theme[f"k{i}"]) ** (1 / 3) for i in range(len(KL_EDGES) + 1)]
    away = 1 if steps[-1] > steps[0] else -1
    assert all(away * (b - a) > 0.01 for a, b in pairwise(steps)), steps


# -- for those who do not tell red from green, or blue from yellow ------------------------------------

VIENOT_1999 = {
    "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}
"""Linear sRGB as a reader without one kind of cone has it: F. Vienot, H. Brettel, J. Mollon, Color Research and
Application 24 (1999) 243, matrices as in DaltonLens' review of simulations."""
BLIND = pytest.mark.parametrize("blind", ["", *VIENOT_1999])


def linear(color: str) -> list[float]:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(color: str, blind: str) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of a color, as seen without a kind of cone."""
    rgb = linear(color)
    if blind:
        rgb = [min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb)))) for row in VIENOT_1999[blind]]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, rgb)) / white for row, white in zip(matrix, (0.9505, 1.0, 1.089))]
    x, y, z = (v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(a: str, b: str, blind: str) -> float:
    """Distance of two colors in L*a*b* (CIE 1976); about 2.3 can just be noticed."""
    return math.dist(lab(a, blind), lab(b, blind))


def test_color_distances_follow_their_definition() -> None:
    assert apart("#000000", "#ffffff", "") == pytest.approx(100, abs=0.1)
    assert apart("#ff0000", "#00ff00", "") == pytest.approx(170.6, abs=0.5)
    # A pure red and a brownish green that deutans confuse are close to each other for them alone.
    assert apart("#a8320f", "#6b5d00", "deutan") < 0.35 * apart("#a8320f", "#6b5d00", "")


@BLIND
@THEMES
def test_the_first_four_series_and_the_pairs_are_told_apart_by_color_alone(theme: dict[str, str], blind: str) -> None:
    """Beyond four, marks and dashes help: no palette of eight is safe for all."""
    colors = [theme[f"arm-{i}"] for i in range(4)]
    assert min(apart(a, b, blind) for a, b in combinations(colors, 2)) > 12


@BLIND
@THEMES
def test_no_two_series_of_eight_are_one_color(theme: dict[str, str], blind: str) -> None:
    colors = [theme[f"arm-{i}"] for i in range(8)]
    assert min(apart(a, b, blind) for a, b in combinations(colors, 2)) > 8
    assert len(set(SYMBOLS)) == 8, "and each has its own mark"


@BLIND
@THEMES
def test_less_likely_and_more_likely_tokens_are_told_apart(theme: dict[str, str], blind: str) -> None:
    for i in range(2, 6):
        assert apart(theme[f"n{i}"], theme[f"p{i}"], blind) > 20
    for sign in "np":
        steps = [lab(theme[f"{sign}{i}"], blind)[0] for i in range(1, 6)]
        away = 1 if steps[-1] > steps[0] else -1
        assert all(away * (b - a) > 3 for a, b in pairwise(steps)), steps


def test_points_of_more_series_than_colors_are_told_apart_too() -> None:
    looks = [(i % NUM_COLORS, symbol_of(i)) for i in range(NUM_COLORS**2)]
    assert len(set(looks)) == len(looks)
