"""A page as a browser's parser reads it."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Parsed(HTMLParser):
    """What a browser's parser would see: tags, attributes, text, raw scripts and styles."""

    tags: list[tuple[str, dict]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    raw: dict[str, list[str]] = field(default_factory=lambda: {"script": [], "style": []})
    inside: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.raw:
            self.raw[self.inside][-1] += data
        else:
            self.text.append(data)


def parse(path: Path) -> Parsed:
    parsed = Parsed()
    parsed.feed(path.read_text("utf-8"))
    parsed.close()
    return parsed
