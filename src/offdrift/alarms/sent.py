"""`SentAlarms`: which alarms went where, so that a watch that starts again does not send them again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from offdrift.texts import read_text


def sent_file(run: Path) -> Path:
    """The file that remembers the alarms of a run, by the run's absolute path, in the user's state folder.

    Reference: XDG Base Directory Specification 0.8, XDG_STATE_HOME.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:32]
    return Path(base) / "offdrift" / "alarms" / f"{name}.txt"


class SentAlarms:
    """A file with a line for each alarm that arrived: digests of the place and of the finding, nothing readable.

    Lines are only ever added, so that two watches may share the file. What cannot be read or written is not
    remembered, and `problem` says why.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problem = ""
        try:
            self._lines = set(read_text(file).splitlines())
        except FileNotFoundError:
            self._lines = set()
        except (OSError, ValueError) as e:
            self._lines = set()
            self.problem = f"{file} cannot be read ({e})"

    def has(self, place: str, alarm: str) -> bool:
        """Whether the alarm of this name has arrived at the place."""
        return self._line(place, alarm) in self._lines

    def add(self, place: str, alarm: str) -> None:
        """Remember that it has."""
        line = self._line(place, alarm)
        self._lines.add(line)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as f:
                f.write(f"{line}\n")
        except OSError as e:
            self.problem = f"{self.file} cannot be written ({e.strerror or e})"

    @staticmethod
    def _line(place: str, alarm: str) -> str:
        return f"{hashlib.sha256(place.encode('utf-8', 'surrogatepass')).hexdigest()[:32]} {alarm}"
