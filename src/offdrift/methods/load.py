"""Methods that users keep in code: "file.py:name" or "package.module:name" stands wherever a method's name does.

`load_method` is the one place that runs such code. It is called with what a user typed, or wrote into a recipe, and
never with what a log, a run's record or a checkpoint says: readers of those use `loaded`, or `without_loading`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, get_type_hints

from offdrift.errors import MethodError
from offdrift.methods.method import Method, row
from offdrift.objectives import Clipped
from offdrift.setting import typed

EXPECTED = (
    "expected an offdrift.Method, a function without required arguments that returns one, or a function whose "
    "arguments are all keywords with defaults"
)
IN_CODE = "your own code"
"""Family of the methods that no table has."""
UNLOADED = row(Clipped(), summary="a method in code that was not run")
"""Stands for a method whose code must not run, inside `without_loading`."""


@dataclass(frozen=True)
class CodeSource:
    """Code that a method was read from."""

    file: str
    """Its absolute path."""
    attribute: str
    sha256: str
    """Of the file's content as it was run; hexadecimal."""

    def as_dict(self) -> dict[str, str]:
        """Plain values, as records have them."""
        return asdict(self)


@dataclass(frozen=True)
class Maker:
    """A function that makes a method from keyword settings, and the settings that it was called with."""

    name: str
    function: Callable[..., Any]
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with its value."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameter.default for name, parameter in parameters.items()} | dict(self.values)

    def method(self) -> Method:
        """Call the function. Raises: `MethodError` if it fails, or returns something else."""
        with reported(self.name):
            made = self.function(**dict(self.values))
        if not isinstance(made, Method):
            raise MethodError(f"{self.name} returned a {type(made).__name__}, {made!r:.80}; {EXPECTED}")
        return replace(made, made_by=self)

    def changed(self, current: Method, changes: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
        """The method under the settings among some changes, and the changes that are left.

        Raises: `MethodError` if a value has another type than its argument, or the method is not what the function
            returned.
        """
        chosen = {name: value for name, value in changes.items() if name in self.settings}
        if not chosen:
            return current, dict(changes)
        if current != self.method():
            raise MethodError(f"{', '.join(chosen)}: settings of {self.name} come before other changes of its method")
        try:
            kinds = get_type_hints(self.function)
        except (NameError, TypeError):  # annotations that only their own module can read
            kinds = {}
        values = {name: typed(f"{self.name} {name}", value, kinds.get(name, Any)) for name, value in chosen.items()}
        made = replace(self, values=tuple((dict(self.values) | values).items()))
        return made.method(), {name: value for name, value in changes.items() if name not in chosen}


class _Content(SourceFileLoader):
    """Runs the bytes that were hashed, whatever is cached or written in the meantime."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._content, self.path)


_MODULES: dict[Path, tuple[ModuleType, str]] = {}
"""Files that were run in this process, with their hashes: a run keeps the code that it began with."""
_METHODS: dict[str, tuple[Method, CodeSource]] = {}
_MAY_LOAD: ContextVar[bool] = ContextVar("may_load", default=True)


def in_code(name: str) -> bool:
    """Whether a method's name is that of code: "file.py:name", "package.module:name".

    Example:
        >>> in_code("mine.py:mine"), in_code("gspo")
        (True, False)
    """
    return ":" in name


def short_name(name: str) -> str:
    """Name for an arm or a folder: the attribute of code, any other name as it is.

    Example:
        >>> short_name("methods/mine.py:mine"), short_name("gspo")
        ('mine', 'gspo')
    """
    return name.rpartition(":")[2]


def displayed(name: str) -> str:
    """The name without the folders of its file.

    Example:
        >>> displayed("/home/me/methods/mine.py:mine"), displayed("gspo")
        ('mine.py:mine', 'gspo')
    """
    return Path(name).name


def absolute(name: str, *folders: Path) -> str:
    """The name with its file as an absolute path, so that every process finds it; any other name as it is.

    Args:
        folders: where a relative path is looked for, in this order; the working folder if none is given.

    Raises: `MethodError` naming file and folders if it is in none of them.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    try:
        path = Path(file).expanduser()
        places = [(folder / path).resolve() for folder in folders or (Path.cwd(),)]
        place = next((place for place in places if place.is_file()), None)
    except (OSError, RuntimeError, ValueError) as e:  # no path at all: a NUL, a loop of links, no home
        raise MethodError(f"{name!r}: {e}") from e
    if place is None:
        looked = " or ".join(dict.fromkeys(str(p) for p in places))
        raise MethodError(f"{name}: there is no file {looked}")
    return f"{place}:{attribute}"


def load_method(name: str) -> Method:
    """Run the code that a name refers to, once in a process, and return its method.

    Args:
        name: "file.py:attribute", relative to the working folder or absolute, or "package.module:attribute". The
            attribute is a `Method`, a function without arguments that returns one, or a function whose arguments are
            all keywords with defaults: these are settings, which `override` changes beside those of the parts.

    Raises: `MethodError` naming file, attribute and what was expected; of code that fails, its own last line.

    Example:
        >>> load_method("offdrift.methods.weighted:PLAIN_ROW")
        Traceback (most recent call last):
        offdrift.errors.MethodError: offdrift.methods.weighted has no 'PLAIN_ROW'; its methods are none
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise MethodError(f'{name!r} is no method; code is named as "file.py:name" or "package.module:name"')
    if not may_load():
        return loaded(name) or UNLOADED
    name = absolute(name)
    if name not in _METHODS:
        _METHODS[name] = _read(name)
    return _METHODS[name][0]


def loaded(name: str) -> Method | None:
    """The method of a name, if this process has run its code already; None if not. Runs nothing."""
    with suppress(MethodError):  # whoever wrote the name may have had another disk
        name = absolute(name)
    return _METHODS[name][0] if name in _METHODS else None


def code_source(name: str) -> CodeSource:
    """File, attribute and hash of the code of a name. Raises: `MethodError` as `load_method`."""
    load_method(name)
    return _METHODS[absolute(name)][1]


def content_hash(file: str | Path) -> str | None:
    """SHA-256 of a file as it is now, hexadecimal; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def may_load() -> bool:
    """Whether code may run here; not so inside `without_loading`."""
    return _MAY_LOAD.get()


@contextmanager
def without_loading() -> Iterator[None]:
    """Run no code inside: a method that this process has not loaded is `UNLOADED`."""
    token = _MAY_LOAD.set(False)
    try:
        yield
    finally:
        _MAY_LOAD.reset(token)


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn what a user's code raises into a `MethodError` with file, line and message.

    Code that meets `MethodError` itself, for instance where parts count a ratio twice, passes its message on.
    """
    try:
        yield
    except SyntaxError as e:
        raise MethodError(f"{name}: {e.filename}, line {e.lineno}: {type(e).__name__}: {e.msg}") from e
    except (Exception, SystemExit) as e:
        raise MethodError(f"{name}: {_place(e)}{type(e).__name__}: {e}") from e


def _place(error: BaseException) -> str:
    """File and line of the last frame of the user's: neither Python's import system, nor a library."""
    libraries = (str(Path(__file__).parents[1]), "<")  # <frozen importlib>, <string> of a dataclass
    frames = [
        f"{frame.filename}, line {frame.lineno}: "
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(libraries)
        and not {"importlib", "site-packages"} & {*Path(frame.filename).parts}
    ]
    return frames[-1] if frames else ""


def _read(name: str) -> tuple[Method, CodeSource]:
    """Import the code of an absolute name and make its method."""
    where, _, attribute = name.rpartition(":")
    module, source = _module(where, name, attribute)
    if not hasattr(module, attribute):
        names = [n for n, x in vars(module).items() if not n.startswith("_") and _may_be_method(x, module)]
        raise MethodError(f"{where} has no {attribute!r}; its methods are {', '.join(names) or 'none'}")
    value = getattr(module, attribute)
    if isinstance(value, Method):
        return value, source
    if not callable(value) or isinstance(value, type):
        raise MethodError(f"{name} is a {type(value).__name__}, {value!r:.80}; {EXPECTED}")
    if required := _required(value):
        raise MethodError(f"{name} needs {', '.join(required)}; {EXPECTED}")
    return Maker(name, value).method(), source


def _required(function: Callable[..., Any]) -> list[str]:
    """Arguments without a default, or that have no keyword."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty or p.kind is p.POSITIONAL_ONLY]


def _may_be_method(value: Any, module: ModuleType) -> bool:
    """Whether it is a method, or a function of the module that may make one: not a statistic, say."""
    is_local = inspect.isfunction(value) and value.__module__ == module.__name__
    return isinstance(value, Method) or (is_local and not _required(value))


def _module(where: str, name: str, attribute: str) -> tuple[ModuleType, CodeSource]:
    """The module of a file, or of a dotted name, with its source."""
    if where.endswith(".py"):
        path = Path(where)
        if path not in _MODULES:
            _MODULES[path] = _run(path, name)
        module, digest = _MODULES[path]
        return module, CodeSource(where, attribute, digest)
    if (folder := str(Path.cwd())) not in sys.path:  # as `python -m` has it; the installed command does not
        sys.path.append(folder)
    try:
        with reported(name):
            module = importlib.import_module(where)
    except MethodError as e:
        if isinstance(e.__cause__, ModuleNotFoundError) and where.startswith(e.__cause__.name or "?"):
            raise MethodError(f"{name}: there is no module {e.__cause__.name!r} in {folder} or installed") from e
        raise
    file = str(module.__file__)
    return module, CodeSource(file, attribute, content_hash(file) or "")


def _run(path: Path, name: str) -> tuple[ModuleType, str]:
    """Run a file as a module of its own, and return its hash."""
    content = path.read_bytes()
    called = f"offdrift_code_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_loader(called, _Content(called, str(path), content))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[called] = module  # dataclasses of the file look for it there
    try:
        with reported(name):
            spec.loader.exec_module(module)
    except MethodError:
        del sys.modules[called]
        raise
    return module, hashlib.sha256(content).hexdigest()
