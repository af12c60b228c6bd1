"""Builds and loads the C++ files of this folder: when, where, and what happens if it does not work.

A library for each file, at its first use. It lies in `$XDG_CACHE_HOME/offdrift` (`~/.cache/offdrift`), which only the
user may write, under a name made of all that decides its machine code: source, compiler, flags and processor. It is
compiled beside that name and moved there whole, so that processes that build it at once disturb nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import torch

LOG = logging.getLogger("offdrift.compiled")

Name = Literal["passes", "exact"]
"""A C++ file of this folder."""

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
SECONDS = 300
"""What the compiler may take."""
BUILDING = "building-"
"""Begins the names of the folders in which libraries are built."""

_lock = threading.Lock()
_loaded: dict[Name, ctypes.CDLL | None] = {}
"""The libraries of this process, None after a failure."""


def library(name: Name) -> ctypes.CDLL | None:
    """The compiled library if it works; builds it at the first use. Who calls has asked whether it is wanted."""
    with _lock:
        if name not in _loaded:
            try:
                _loaded[name] = ctypes.CDLL(str(built(name)))
            except Exception as error:  # whatever the reason, the plain way is right, only slower
                LOG.warning("no compiled %s, a slower way is used: %s", name, first_line(error))
                _loaded[name] = None
        return _loaded[name]


def built(name: Name) -> Path:
    """Path of the library, compiled unless it is there.

    Raises: `OSError` without a compiler or a folder; `subprocess.SubprocessError` if it fails or takes too long.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: install g++ or clang++, or name one in $CXX")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    source = Path(__file__).with_name(f"{name}.cpp")
    parts = (source.read_text(encoding="utf-8"), compiler, version.stdout, *flags(), processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}-{digest}.so"
    if not path.exists():
        # What builds left that were killed: none takes twice as long as its compiler may.
        for left in path.parent.glob(f"{BUILDING}*"):
            with contextlib.suppress(OSError):  # another process was faster
                if time.time() - left.stat().st_mtime > 2 * SECONDS:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *flags(), "-o", str(made), str(source)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
            made.replace(path)
    return path


def flags() -> tuple[str, ...]:
    """Options of the compiler; without AVX-512 where torch does without (`ATEN_CPU_CAPABILITY=avx2`)."""
    return (*FLAGS, "-mno-avx512f") if torch.backends.cpu.get_cpu_capability() == "AVX2" else FLAGS


def cache_folder() -> Path:
    """The user's own folder for built libraries, made if it is not there.

    Raises: `OSError` if it belongs to somebody else or others may write to it.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offdrift"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others: code from there is not loaded")
    return folder


def processor() -> str:
    """The facts of the processor that `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "model\t"))})
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *facts])


def first_line(error: Exception) -> str:
    """One line of an error; of a compiler's, the first that it printed."""
    printed = getattr(error, "stderr", None)
    return next(iter(str(printed or error).splitlines()), type(error).__name__)
