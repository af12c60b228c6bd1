"""Good inputs spoiled: a value replaced by a nasty one where the format has values, else bytes changed, cut or doubled."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

JSON = (
    "null", "true", "false", "0", "-1", "-0.0", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 400, "9" * 5000, '""', '"x"', '"nan"', '"\\ud800"', '"\\u0000"', '"../../etc/passwd"',
    '"/etc/passwd"', '"<script>alert(1)</script>"', '"[bold]x[/]"', '"[/]"', '"\\u001b[2J"', "[]", "{}", "[null]", "[[]]", "[{}]",
    '[1, "a", null]', '{"": null}', '{"a": {"a": {"a": []}}}', "[" * 600 + "]" * 600, '{"a":' * 400 + "1" + "}" * 400,
    '"' + "y" * 70_000 + '"', "[-1, -2, -3]", "[NaN, 1e400]", "2147483648", "1e-320",
)  # fmt: skip
"""Values as they stand in a file."""

TOML = (
    "0", "-1", "1.5", "nan", "inf", "-inf", "true", '""', '"x"', '"../../x"', '"/etc/passwd"', "'file.py:f'", "[]", "{}",
    "[1, 2]", "[[]]", '["a", 1]', "{ a = 1 }", "1979-05-27", "9223372036854775808", "1" * 5000, "[" * 600 + "]" * 600,
    '"""', "{", '"\\u0000"', '"[/]"', "1e400", "99999999999",
)  # fmt: skip
HERE = "\u241eHERE\u241e"


def spoiled(file: Path, content: bytes, draw: random.Random) -> bytes:
    """The content of a file with one thing wrong, two at times."""
    kind = file.suffix
    for _ in range(draw.choice((1, 1, 1, 2))):
        try:
            if kind == ".jsonl" and draw.random() < 0.8:
                lines = content.decode().split("\n")
                at = draw.randrange(max(1, len(lines) - 1))
                lines[at] = _value(lines[at], draw)
                content = "\n".join(lines).encode()
                continue
            if kind == ".json" and draw.random() < 0.85:
                content = _value(content.decode(), draw).encode()
                continue
            if kind == ".toml" and draw.random() < 0.8:
                content = _setting(content.decode(), draw).encode()
                continue
        except (ValueError, RecursionError):  # it is spoiled already
            pass
        content = _bytes(content, draw)
    return content


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of the values in a value, of long lists the first."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [at, *(place for key, x in pairs for place in _places(x, (*at, key)))]


def _value(text: str, draw: random.Random) -> str:
    """A text of JSON with a value replaced, or a key renamed or gone."""
    value = json.loads(text)
    # A level is drawn first: most values stand deep inside, and the shallow ones decide how the rest is read.
    by_level: dict[int, list[tuple[Any, ...]]] = {}
    for place in _places(value):
        by_level.setdefault(len(place), []).append(place)
    *path, last = (None, *draw.choice(by_level[draw.choice(sorted(by_level))]))
    if last is None:
        return draw.choice(JSON)
    holder = value
    for key in path[1:]:
        holder = holder[key]
    if isinstance(holder, dict) and draw.random() < 0.15:
        x = holder.pop(last)
        if draw.random() < 0.5:
            holder["" if draw.random() < 0.5 else f"{last}/../<b>"] = x
        return json.dumps(value)
    holder[last] = HERE
    return json.dumps(value).replace(json.dumps(HERE), draw.choice(JSON))


def _setting(text: str, draw: random.Random) -> str:
    """A text of TOML with a value or a key replaced."""
    matches = list(re.finditer(r"(?m)(^|[{,]\s*)([\w.]+)(\s*=\s*)([^#\n,}]+)", text))
    if not matches:
        raise ValueError("it holds no setting any more")
    match = draw.choice(matches)
    group, new = (
        (2, draw.choice(("x", '""', '"a.b"', "a.b", "name"))) if draw.random() < 0.15 else (4, draw.choice(TOML))
    )
    return text[: match.start(group)] + new + text[match.end(group) :]


def _bytes(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    how = draw.choice(("flip", "flip", "cut", "double", "insert", "number"))
    at = draw.randrange(max(1, len(data)))
    if how == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            if data:
                data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif how == "cut":
        del data[at:]
    elif how == "double":
        data[at:at] = data[at : at + 64]
    elif how == "insert":
        data[at:at] = draw.choice((b"\xff\xfe", b"\x00" * 8, b"\n", b"\xe2\x80\xa8", b"]" * 20, b"{"))
    else:  # a length or an offset
        data[at : at + 4] = draw.choice((b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00" * 4))
    return bytes(data)
