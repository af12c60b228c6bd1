"""The address of a heading within its page: one rule for GitHub, for the site and for links that are generated."""


def anchor(heading: str) -> str:
    """The address of a heading, as GitHub makes it.

    Example:
        >>> anchor("2026-11-24: each text is read once")
        '2026-11-24-each-text-is-read-once'
    """
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")
