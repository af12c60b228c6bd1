"""Formulas of the pages: a terminal gets text, and every command of TeX that a page uses is known."""

import re
from pathlib import Path

import pytest

from offdrift.show.formulas import FENCE, INLINE, plain_formula, with_plain_formulas

DOCS = Path(__file__).parents[2] / "docs"
FORMULAS = [
    (page.name, tex)
    for page in sorted(DOCS.rglob("*.md"))
    for pattern in (FENCE, INLINE)
    for tex in pattern.findall(page.read_text("utf-8"))
]


def test_every_formula_of_a_page_becomes_text():
    assert len(FORMULAS) > 45
    left = [(page, plain_formula(tex)) for page, tex in FORMULAS if re.search(r"[\\{}&]", plain_formula(tex))]
    assert left == []


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\frac{a + b}{c d}", "(a + b) / (c d)"),
        (r"\frac{\sum_i w_i}{n}", "Σ_i w_i / n"),
        (r"\frac{a / b}{c}", "(a / b) / c"),
        (r"\sqrt{\text{KL}_{\text{seq}}/2}", "sqrt(KL_seq/2)"),
        (r"\mathbb{E}_{c \sim \pi}[R] \ge 0", "E_(c ~ π)[R] ≥ 0"),
        (r"B^{*\prime}, L'_{\text{masked}}", "B*', L'_masked"),
        ("\\begin{aligned}\na &= b \\\\\nc &\\le d\n\\end{aligned} \\tag{9}", "a = b\nc ≤ d   (9)"),
        (r"\unknown{x}", r"\unknownx"),
    ],
)
def test_a_formula_as_text(tex, text):
    assert plain_formula(tex) == text


def test_a_page_keeps_what_is_no_formula():
    page = "It costs $5.\n\n```math\nx \\le 1\n```\n\n| $`\\delta`$ | `$HOME` |\n\n```sh\necho $`a`\n```\n"
    assert with_plain_formulas(page) == "It costs $5.\n\n    x ≤ 1\n\n| `δ` | `$HOME` |\n\n```sh\necho $`a`\n```\n"
