"""What a reader sees wrong on a page, in both themes, on a wide and on a narrow screen."""

from pathlib import Path

from tests.show.browser import Browser

FAULTS = Path(__file__).with_name("eyes.js").read_text("utf-8")
SCREENS = ((1280, 800), (390, 844))


def faults(chrome: Browser, settle: str = "true") -> list[str]:
    """Return what is wrong with the page that is open, each with the screen on which it was seen first.

    Args:
        settle: what is true once the page has followed a change of width or theme.
    """
    seen: dict[str, str] = {}
    for dark in (False, True):
        for width, height in SCREENS:
            chrome.resize(width, height)
            chrome.media(dark=dark)
            chrome.wait(settle)
            for fault in chrome.run(FAULTS):
                seen.setdefault(fault, f"{width} pixels, {'dark' if dark else 'light'}: {fault}")
    return list(seen.values())
