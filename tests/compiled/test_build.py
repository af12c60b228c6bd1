"""Building the library in several processes at once, and in one that is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offdrift.compiled import build

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no C++ compiler"
)

USE = """
import torch
from offdrift.compiled import build, compiled_passes, passes
with compiled_passes():
    print(build.library("passes") is not None, passes.segment_sums(torch.arange(9.0), torch.tensor([0, 4, 9])).tolist())
"""
RIGHT = "True [6.0, 30.0]\n"

COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo 'a compiler of tests'
while [ "$1" != -o ]; do shift; done
head -c 5000 '{library}' > "$2"
touch "{here}/started-$$"
if [ -e "{here}/hangs" ]; then exec sleep 60; fi
for i in $(seq 400); do [ "$(ls "{here}" | grep -c started)" -ge 2 ] && break; sleep 0.05; done
cp '{library}' "$2"
"""
"""Hands out a library that was built before: half of it, and the rest when two have asked, or never."""


def process(here: Path) -> subprocess.Popen[str]:
    """A process that uses the library, from a cache of its own in this folder."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCH_COMPILE_DISABLE", "OFFDRIFT_COMPILE")}
    environment |= {"CXX": str(here / "c++"), "XDG_CACHE_HOME": str(here / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", USE], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def with_compiler(here: Path) -> Path:
    script = here / "c++"
    script.write_text(COMPILER.format(here=here, library=build.built("passes")))
    script.chmod(0o700)
    return here / "cache" / "offdrift"


def test_two_processes_that_build_at_once_both_get_the_library(fresh: None, tmp_path: Path) -> None:
    cache = with_compiler(tmp_path)
    both = [process(tmp_path) for _ in range(2)]
    assert [one.communicate(timeout=120)[0] for one in both] == [RIGHT] * 2
    assert len(list(tmp_path.glob("started-*"))) == 2
    assert [x.suffix for x in cache.iterdir()] == [".so"]


def test_a_build_that_is_killed_half_way_leaves_no_library_and_no_folder_for_long(fresh: None, tmp_path: Path) -> None:
    cache = with_compiler(tmp_path)
    (tmp_path / "hangs").touch()
    killed = process(tmp_path)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("started-*")) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert [x.stat().st_size for x in cache.rglob("*.so")] == [5000]
    assert not list(cache.glob("*.so"))
    (tmp_path / "hangs").unlink()
    (left,) = cache.iterdir()
    hour_ago = time.time() - 3600
    os.utime(left, (hour_ago, hour_ago))
    (cache / f"{build.BUILDING}now").mkdir()  # of a build that is under way
    assert process(tmp_path).communicate(timeout=120)[0] == RIGHT
    assert {x.suffix or x.name for x in cache.iterdir()} == {".so", f"{build.BUILDING}now"}
