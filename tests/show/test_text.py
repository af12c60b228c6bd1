"""Characters without a look are shown as codes, all others as they are."""

from __future__ import annotations

import pytest

from offdrift.show.json_access import visible, visible_token


@pytest.mark.parametrize("text", ["a\tb\nc é 漢 ½ ∅", "👩\u200d🚀", "می\u200cخواهم", "\ufffd", ""])
def test_what_can_be_seen_is_left_alone(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("code", [0x00, 0x1B, 0x7F, 0x200B, 0x2028, 0x2029, 0x202E, 0x2066, 0xD800, 0xFEFF])
def test_what_cannot_be_seen_is_shown_as_its_code(code: int) -> None:
    assert visible(f"a{chr(code)}b") == f"a\\u{code:04x}b"


def test_newlines_and_empty_tokens_have_a_sign() -> None:
    assert [visible_token(t) for t in ("", "\n", "\n\nx", " y")] == ["∅", "↵\n", "↵\n↵\nx", " y"]
