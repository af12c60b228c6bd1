"""The command line as a user has it: the `offdrift` beside this interpreter, in the folder where the script runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import offdrift as od

COMMAND = Path(sys.executable).with_name("offdrift")


class Done(NamedTuple):
    """Printed text of a command that ended with the expected status."""

    stdout: str
    stderr: str

    @property
    def hint(self) -> list[str]:
        """Words of the next command that it suggests, without `offdrift`; of two joined by && the words of both."""
        found = re.search(r"next: (.*?)(?:  # .*)?$", self.stderr, re.MULTILINE)
        assert found, f"no next step in:\n{self.stderr}"
        return shlex.split(found[1])[1:]


def installed_package() -> None:
    """Refuse to run against a checkout: what is tried is the wheel of this environment."""
    home = Path(od.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"{home} is outside the environment {sys.prefix}"
    assert not any(parent.joinpath("pyproject.toml").is_file() for parent in Path.cwd().parents), "in a checkout"


def offdrift(*words: str, status: int = 0) -> Done:
    """Run `offdrift WORDS`; it must end with that exit status and without a traceback."""
    done = subprocess.run([str(COMMAND), *words], capture_output=True, text=True, timeout=600)
    said = f"offdrift {shlex.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert done.returncode == status, said
    assert "Traceback" not in done.stdout + done.stderr, said
    return Done(done.stdout, done.stderr)
