"""Mathematical answers, compared by math-verify in a process of its own.

    reward = "math"        # \\boxed{\\frac{1}{2}}, $0.5$ and 1/2 are all the answer 1/2

What a completion writes is read as mathematics, and `9^{9^{9^9}}` costs whoever simplifies it all memory and an hour
in one call of C, which no signal ends. So the reading is done by a child with limited memory, which is killed when it
takes too long: such a completion earns 0, as one does whose answer cannot be read.

The file is also the child's program, hence only the standard library above.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offdrift_lab.train.data.problems import Problem

SECONDS = 3.0
"""For one completion."""
SECONDS_TO_START = 120.0
MEMORY = 2 * 2**30
"""Address space of the child, bytes."""
LONGEST = 10_000
"""Characters of a completion that are read: its last."""

PLAIN = re.compile(r"-?(?:\d[\d,]*)?\.?\d+(?:\s*/\s*\d+)?(?:\s*\\?%)?", re.ASCII)
"""A number, a fraction or a percentage outside of LaTeX."""


class MathVerifier:
    """1 if a completion's last answer equals the problem's mathematically; otherwise 0.

    The child starts with the first completion and ends with this process.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, completion: str, problem: Problem) -> float:
        """The reward of one completion. Never raises, whatever the text."""
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        self._child = child
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps([problem.answer, completion[-LONGEST:]]) + "\n")
            child.stdin.flush()
        verdict = child.stdout.readline() if select.select([child.stdout], [], [], SECONDS)[0] else ""
        if not verdict:  # too long, too large, or crashed
            self.close()
        return float(verdict.strip() == "1")

    def _start(self) -> subprocess.Popen[str]:
        """Raises: `RecipeError` if math-verify cannot be imported."""
        child = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        if select.select([child.stdout], [], [], SECONDS_TO_START)[0] and child.stdout.readline():
            return child
        from offdrift.errors import RecipeError

        child.kill()
        _, reason = child.communicate()
        raise RecipeError(
            'reward = "math" needs math-verify, which does not start: '
            f"{(reason.strip().splitlines() or ['no answer'])[-1]}; pip install 'offdrift[train]'"
        )

    def close(self) -> None:
        """End the child; the next completion starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def __del__(self) -> None:
        self.close()


def in_latex(text: str) -> str:
    """An answer as LaTeX: itself if it says so, else between dollars."""
    text = re.sub(r"(?<!\\)%", r"\\%", text.strip())  # a bare one begins a comment
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _serve() -> None:
    """The child: lines of [answer, completion] in, lines of 0 or 1 out."""
    import logging
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads it from here on
    # Only LaTeX: the other reader of math-verify hands what it finds to sympy's parser, which evaluates it.
    latex: Any = [LatexExtractionConfig()]

    def same(answer: str, completion: str) -> bool:
        expected = parse(in_latex(answer), latex, parsing_timeout=0)
        written = parse(completion, latex, parsing_timeout=0)
        if not written and (plain := PLAIN.findall(completion)):
            written = parse(in_latex(plain[-1]), latex, parsing_timeout=0)
        return verify(expected, written, timeout_seconds=0)

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            verdict = same(*json.loads(line))
        except Exception:  # whatever a text provokes in those who read it: it is not the answer
            verdict = False
        print(int(verdict), flush=True)


if __name__ == "__main__":
    _serve()
