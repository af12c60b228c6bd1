"""Formulas of the documentation as text: a page has them in TeX, which a browser draws, and a terminal cannot."""

from __future__ import annotations

import re

FENCE = re.compile(r"^```math\n(?P<tex>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`([^`\n]+)`\$")
"""A formula within a line, in the marks that GitHub reads."""
SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "varepsilon": "ε",
    "kappa": "κ",
    "mu": "μ",
    "pi": "π",
    "sigma": "σ",
    "chi": "χ",
    "Sigma": "Σ",
    "Phi": "Φ",
    "sum": "Σ",
    "prod": "Π",
    "le": "≤",
    "ge": "≥",
    "in": "∈",
    "ni": "∋",
    "subseteq": "⊆",
    "sim": "~",
    "propto": "∝",
    "pm": "±",
    "cdot": "·",
    "mid": "|",
    "ldots": "...",
    "min": "min",
    "max": "max",
    "log": "log",
    "exp": "exp",
    "prime": "'",
}
"""What a command without arguments stands for."""
SPACES = {"quad": "   ", "qquad": "     ", ",": " ", ";": " ", "!": "", "|": "||", "_": "_"}
SIZES = r"\\(?:bigl|bigr|Bigl|Bigr|left|right)(?![A-Za-z])"
"""Sizes of brackets: the brackets themselves stay."""
ARGUMENT = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
"""What stands in braces, which may have braces inside once."""
ROWS = re.compile(r"\\(?:begin|end)\{(?:aligned|gathered)\}")


def plain_formula(tex: str) -> str:
    r"""Return a formula in TeX as lines of text, each equation as long as it is.

    It reads the commands that our pages use: `SYMBOLS`, `SPACES`, fractions, roots, words, braces below, and rows.

    Args:
        tex: what stands between the marks of a block of mathematics.

    Example:
        >>> print(plain_formula(r"|\text{Error}| \le \text{KL}_{\text{seq}} \tag{6}"))
        |Error| ≤ KL_seq   (6)
        >>> print(plain_formula(r"\alpha_t = \frac{6 \alpha}{\pi^2 t^2}"))
        α_t = 6 α / (π^2 t^2)
    """
    numbers = re.findall(r"\\tag\{(\d+)\}", tex)
    text = ROWS.sub("", re.sub(r"\\tag\{\d+\}", "", tex))
    lines = [_line(row) for row in text.split(r"\\")]
    lines = [line for line in lines if line]
    return "\n".join(lines) + (f"   ({numbers[0]})" if numbers else "")


def with_plain_formulas(markdown: str) -> str:
    """Return a page whose blocks of mathematics are indented text, and whose formulas within a line are code."""

    def block(match: re.Match[str]) -> str:
        return "\n".join(f"    {line}" for line in plain_formula(match["tex"]).split("\n"))

    return INLINE.sub(lambda match: f"`{plain_formula(match[1])}`", FENCE.sub(block, markdown))


def _line(row: str) -> str:
    text = re.sub(SIZES, "", row.replace("&&", r"\qquad ").replace("&", ""))
    text = re.sub(r"\\(?:text|mathrm|operatorname)\{([^{}]*)\}", r"\1", text)
    text = text.replace(r"\mathbb{E}", "E").replace(r"\tfrac{1}{2}", "1/2")
    text = re.sub(rf"\\underbrace{ARGUMENT}_{ARGUMENT}", r"\1 [\2]", text)
    while r"\frac" in text:
        text = re.sub(
            rf"\\frac{ARGUMENT}{ARGUMENT}",
            lambda m: f"{_bracketed(m[1], ' [-+/] ')} / {_bracketed(m[2], ' ')}",
            text,
            count=1,
        )
    text = re.sub(rf"\\sqrt{ARGUMENT}", r"sqrt(\1)", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: SYMBOLS.get(m[1], SPACES.get(m[1], m[0])), text)
    text = re.sub(r"\\([,;!|_])", lambda m: SPACES[m[1]], text)
    text = re.sub(r"\^\{(\*[*']*)\}", r"\1", text)
    text = re.sub(r"([_^])\{(\w+)\}", r"\1\2", text)
    text = re.sub(r"([_^])\{([^{}]*)\}", r"\1(\2)", text)
    return re.sub(r"(?<=\S) {2}(?=\S)", " ", text.replace("{", "").replace("}", "").strip())


def _bracketed(text: str, pattern: str) -> str:
    return f"({text})" if re.search(pattern, text.strip()) else text
