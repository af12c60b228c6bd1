"""Pickles of unknown origin, as data: nothing in them is called, and what they may take is bounded.

A pickle is a program. Its instructions are interpreted one by one: those that build numbers, texts, lists and dicts are
known, the others are refused. A name that it asks for is looked up in a table of harmless stand-ins and never imported;
in dumps that carry what a user put beside the samples, a name that is not there stands for an `Inert` value.
What is built is charged to a budget before the next instruction, since a few bytes can ask for gigabytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offdrift.errors import RecordError
from offdrift.records.readers.files import LIMIT, Budget, Bytes, too_large

SCALARS = re.compile(rb"(?:K.|M..|J....|G.{8}|[N\x88\x89])+", re.DOTALL)
"""A run of numbers, None, True and False: instructions of fixed length that do nothing else."""

SCALAR, INSTRUCTION = 40, 256
"""Bytes that one number takes in a list, and any other instruction at most beside its argument."""

CONSTANTS = frozenset({
    "LONG1", "LONG4", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
    "BINBYTES8", "BYTEARRAY8", "SHORT_BINSTRING", "BINSTRING",
})  # fmt: skip
OPCODES = {code.code: code for code in pickletools.opcodes}
KEYS = (str, int, float, bytes, type(None))
"""What may be a key: the hash of a tuple follows it to any depth, and ends the process."""


@dataclass
class TensorBatch:
    """Inert stand-in that SkyRL's batches unpickle to: it holds their state and runs no code."""

    state: object


@dataclass
class Dtype:
    """A number type of NumPy."""

    code: str | Inert
    """Inert for a type that is made of classes, such as those of record arrays."""

    def build(self, state: Any) -> None:
        """The byte order, which a pickle states apart."""
        if isinstance(self.code, str) and state[1] in ("<", ">"):
            self.code = state[1] + self.code

    @property
    def numeric(self) -> bool:
        """Whether these are numbers, not texts, dates or objects."""
        return re.fullmatch(r"[<>]?(?:[fiu][1248]|b1)", str(self.code)) is not None

    def of(self) -> np.dtype:
        if not self.numeric:
            raise RecordError(f"the file holds an array of NumPy type {str(self.code)[:20]!r}, no numbers")
        return np.dtype(str(self.code))


@dataclass
class Array:
    """A NumPy array."""

    value: np.ndarray | Inert = field(default_factory=lambda: np.zeros(0))

    def build(self, state: Any) -> None:
        """Shape, type and bytes, as `ndarray.__reduce__` states them."""
        _, shape, dtype, fortran, raw = state
        if not dtype.numeric:
            self.value = Inert(f"a NumPy array of type {str(dtype.code)[:20]!r}")
            return
        flat = np.frombuffer(raw, dtype.of())
        self.value = flat.reshape(shape, order="F" if fortran else "C")


@dataclass(frozen=True)
class Stored:
    """A tensor that is read from the archive when it is wanted."""

    read: Callable[[], Tensor]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, eq=False)
class Inert:
    """An object of a class that no log needs (a date, a path, ...): its name, and nothing of what it holds."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


def plain(value: Any) -> Any:
    """A tensor or array that a file holds; any other value as it is.

    Raises: `RecordError` for an `Inert` value, of which nothing is known.
    """
    if isinstance(value, Stored):
        return value.read()
    value = value.value if isinstance(value, Array) else value
    if isinstance(value, Inert):
        raise RecordError(f"the file asks for {value.name} where a log has numbers; it was not run")
    return value


def decode(
    data: bytes,
    names: Mapping[tuple[str, str], object],
    budget: Budget,
    persistent: Callable[[Any], object] | None = None,
    *,
    inert: bool = False,
) -> Any:
    """Decode a pickle without running code, within a memory budget.

    Args:
        data: the pickle.
        names: what each name that it may ask for stands for.
        budget: what it may take.
        persistent: what an id that points outside of the pickle stands for.
        inert: whether other names stand for `Inert` values, unless they are of `ACTING` modules, rather than being
            refused.

    Raises: `RecordError` if it asks for anything but data, or takes more than it may; whatever else (`ValueError`,
        `IndexError`, ...) if it is damaged.
    """
    machine = Machine(names, budget, persistent, inert=inert)
    stream = io.BytesIO(data)
    while True:
        if run := SCALARS.match(data, stream.tell()):
            values = pickle.loads(b"\x80\x02(" + run.group() + b"l.")
            budget.spend(SCALAR * len(values))
            machine.stack += values
            stream.seek(run.end())
        code = OPCODES[stream.read(1).decode("latin-1")]
        arg: Any = None if code.arg is None else code.arg.reader(stream)
        budget.spend(INSTRUCTION)
        if code.name == "STOP":
            return machine.stack.pop()
        INSTRUCTIONS.get(code.name, Machine.refused)(machine, code.name, arg)


@dataclass
class Machine:
    """Stack and memo of a pickle that is decoded, and a method for each kind of instruction: its name, its argument."""

    names: Mapping[tuple[str, str], object]
    budget: Budget
    persistent: Callable[[Any], object] | None
    inert: bool
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def refused(self, name: str, arg: Any) -> None:
        """Raise `RecordError` for an instruction that no log needs."""
        raise RecordError(f"the pickle has the instruction {name}, which no log needs; it was not run")

    def nothing(self, name: str, arg: Any) -> None:
        """Pass over what is about the encoding."""

    def marked(self, count: int | None = None) -> list[Any]:
        """Take the values above the last mark from the stack, or the uppermost `count`."""
        begin = self.marks.pop() if count is None else len(self.stack) - count
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, kind: type, name: str) -> Any:
        """The uppermost value, which has to be of a kind; None where it is inert."""
        value = self.stack[-1]
        if isinstance(value, Inert):
            return None
        if type(value) is not kind:
            raise ValueError(f"{name} on a {type(value).__name__}")
        return value

    def mark(self, name: str, arg: Any) -> None:
        """Mark the stack's height."""
        self.marks.append(len(self.stack))

    def constant(self, name: str, arg: Any) -> None:
        """Push a text, bytes or a large number."""
        self.budget.spend(sys.getsizeof(arg))
        self.stack.append(arg)

    def put(self, name: str, arg: Any) -> None:
        """Note the uppermost value under a number, the next if none is given."""
        self.memo[len(self.memo) if arg is None else arg] = self.stack[-1]

    def get(self, name: str, arg: Any) -> None:
        """Take a noted value."""
        self.stack.append(self.memo[arg])

    def empty(self, name: str, arg: Any) -> None:
        """Push an empty container; a set is a list here."""
        self.stack.append({"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}.get(name, list)())

    def tuple_of(self, name: str, arg: Any) -> None:
        """Push a tuple of what is marked, or of the uppermost 1 to 3 values."""
        self.stack.append(tuple(self.marked(int(name[-1]) if name[-1].isdigit() else None)))

    def frozenset_of(self, name: str, arg: Any) -> None:
        """Push a list of what is marked."""
        self.stack.append(self.marked())

    def append(self, name: str, arg: Any) -> None:
        """Add a value, or what is marked, to a list."""
        values = self.marked(1 if name == "APPEND" else None)
        if (to := self.top(list, name)) is not None:
            to.extend(values)

    def set_items(self, name: str, arg: Any) -> None:
        """Add keys and values to a dict."""
        values = self.marked(2 if name == "SETITEM" else None)
        for i, key in enumerate(values[::2]):
            if not isinstance(key, KEYS) and self.inert:
                values[2 * i] = Inert(f"a {type(key).__name__} as a key")
            elif not isinstance(key, KEYS):
                raise RecordError(f"the pickle has a {type(key).__name__} as a key; it was refused")
        if (to := self.top(dict, name)) is not None:
            to.update(zip(values[::2], values[1::2], strict=True))

    def look_up(self, name: str, arg: Any) -> None:
        """Push what a name of a module stands for."""
        if name == "STACK_GLOBAL":
            arg = " ".join(map(str, (self.stack.pop(-2), self.stack.pop())))
        module, _, attribute = str(arg).partition(" ")
        of_skyrl = module.startswith("skyrl") and module.endswith(f".{BATCHES}")
        key = ("skyrl" if of_skyrl else module, attribute)
        asked = f"{module[:80]}.{attribute[:80]}"
        if key not in self.names and (not self.inert or acting(module, attribute)):
            raise RecordError(f"the pickle asks for {asked}, which no log needs; it was not run")
        self.stack.append(self.names[key] if key in self.names else Inert(asked))

    def new_object(self, name: str, arg: Any) -> None:
        """Take the arguments of an object of a class, which is inert."""
        if not self.inert:
            self.refused(name, arg)
        del self.stack[-2 if name == "NEWOBJ_EX" else -1 :]
        if not isinstance(self.stack[-1], Inert):
            raise RecordError("the pickle makes an object of what is no class; it was refused")

    def call(self, name: str, arg: Any) -> None:
        """Push what a function of `names` makes of its arguments."""
        args, function = self.stack.pop(), self.stack.pop()
        if isinstance(function, Inert):
            self.stack.append(function)
            return
        if not callable(function):  # nothing that a pickle builds can be called, but the values of `names`
            raise RecordError("the pickle calls what is no function; it was refused")
        made = function(*args)
        self.budget.spend(sys.getsizeof(made))
        self.stack.append(made)

    def build(self, name: str, arg: Any) -> None:
        """Set the state of an array or a number type."""
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Inert):
            return
        if not isinstance(value, Dtype | Array):
            raise RecordError(
                f"the pickle sets attributes of a {type(value).__name__}, which no log needs; it was refused"
            )
        value.build(state)

    def refer(self, name: str, arg: Any) -> None:
        """Push what an id stands for that points outside of the pickle."""
        if self.persistent is None:
            return self.refused(name, arg)
        self.stack.append(self.persistent(self.stack.pop()))


INSTRUCTIONS: Mapping[str, Callable[[Machine, str, Any], None]] = {
    name: method
    for names, method in (
        (("PROTO", "FRAME"), Machine.nothing),
        (("MARK",), Machine.mark),
        (CONSTANTS, Machine.constant),
        (("BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.put),
        (("BINGET", "LONG_BINGET"), Machine.get),
        (("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_SET", "EMPTY_DICT"), Machine.empty),
        (("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), Machine.tuple_of),
        (("FROZENSET",), Machine.frozenset_of),
        (("APPEND", "APPENDS", "ADDITEMS"), Machine.append),
        (("SETITEM", "SETITEMS"), Machine.set_items),
        (("GLOBAL", "STACK_GLOBAL"), Machine.look_up),
        (("NEWOBJ", "NEWOBJ_EX"), Machine.new_object),
        (("REDUCE",), Machine.call),
        (("BUILD",), Machine.build),
        (("BINPERSID",), Machine.refer),
    )
    for name in names
}
"""What is done at each instruction; all others are refused."""


ACTING = frozenset(
    [
        "os",
        "posix",
        "nt",
        "sys",
        "subprocess",
        "importlib",
        "runpy",
        "pty",
        "shutil",
        "socket",
        "ctypes",
        "code",
        "webbrowser",
        "pickle",
        "_pickle",
        "cPickle",
        "marshal",
        "commands",
        "imp",
    ]
)
"""Modules of which a log that is not a program asks for nothing, save the `VALUES`: said aloud, although nothing would
be run. Protocol 2, which `torch.save` writes, has Python 2's names for some."""
COMMANDS = frozenset(["__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile", "exit"])
COMMANDS |= frozenset(["file", "FileIO", "globals", "input", "locals", "open", "open_code", "quit", "raw_input"])
COMMANDS |= frozenset(["help", "print", "reload", "setattr", "vars"])
"""Builtins, and names of `io`, that act. `getattr` is how protocol 2 names a class within a class, such as the
enumeration of a sample's states."""
VALUES = frozenset(["PathLike", "stat_result", "statvfs_result", "terminal_size", "times_result", "uname_result"])
VALUES |= frozenset(["CompletedProcess", "SubprocessError", "CalledProcessError", "TimeoutExpired"])
VALUES |= frozenset(["AddressFamily", "SocketKind", "gaierror", "herror", "SameFileError", "UnpicklingError"])
"""What these modules have beside what acts: results and errors, such as those of a reward that ran code."""


def acting(module: str, name: str) -> bool:
    """Whether only a program would ask for this name."""
    home = module.partition(".")[0]
    if home in ("builtins", "__builtin__", "io", "_io"):
        return name in COMMANDS
    return home in ACTING and name not in VALUES


BATCHES = "training_batch"
"""Last part of the module that SkyRL's batches come from; its package moved between versions."""


def _uncalled(*args: object) -> object:
    raise RecordError("the pickle makes a batch in a way that SkyRL does not; it was refused")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RecordError(f"the pickle encodes a text as {encoding[:20]!r}; it was refused")
    return text.encode("latin1")


_BUILTIN: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): lambda: {},
    ("collections", "defaultdict"): lambda *of: {},
    ("builtins", "set"): list,
    ("__builtin__", "set"): list,
    ("torch", "device"): lambda *args: "cpu",
    ("torch", "Size"): tuple,
    ("_codecs", "encode"): _encoded,
    ("numpy", "ndarray"): _uncalled,
    ("numpy", "dtype"): lambda code, *flags: Dtype(code),
    **{
        (module, name): call
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, call in (
            ("_reconstruct", lambda kind, shape, code: Array()),
            (
                "scalar",
                lambda dtype, raw: (
                    np.frombuffer(raw, dtype.of())[0].item() if dtype.numeric else Inert("a NumPy scalar")
                ),
            ),
        )
    },
}

_SKYRL: Mapping[tuple[str, str], object] = MappingProxyType({
    **_BUILTIN,
    ("skyrl", "_rebuild_tensor_batch"): lambda kind, state: TensorBatch(state),
    ("skyrl", "TensorFormat"): lambda form: form if isinstance(form, str) else _uncalled(),
    **{("skyrl", n): _uncalled for n in ("TensorBatch", "TrainingInputBatch", "TrainingOutputBatch")},
})  # fmt: skip
"""SkyRL's classes are only passed to `_rebuild_tensor_batch`; since 0.4.0 a tensor's form is a member of an enum."""

DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8,
    "Byte": torch.uint8, "Bool": torch.bool,
}  # fmt: skip


def load_pickle(file: Bytes, limit: int = LIMIT) -> Any:
    """Read a pickle file as plain data.

    Raises: `RecordError` if it asks for anything but data, or takes more than `limit` bytes of memory.
    """
    if _size(file) > limit:
        raise RecordError(too_large("the pickle has", limit))
    return decode(file.read(), _SKYRL, Budget(limit))


def _size(file: Bytes) -> int:
    size = int(file.seek(0, io.SEEK_END))
    file.seek(0)
    return size


def load_torch(file: Bytes, limit: int = LIMIT) -> Any:
    """Read a file of `torch.save`: builtin containers with `Stored` tensors and NumPy arrays in them.

    What a user put beside the samples (dates, paths, objects of classes of their own) becomes `Inert`.

    A tensor is read when it is wanted, from a record that the file really holds: the records of the archive are not
    compressed and not larger than the file together, and no tensor has more elements than its storage. `file` must
    still be open then.

    Raises: `RecordError` naming what the file asks for beyond that, or beyond `limit` bytes of memory.
    """
    size, budget = _size(file), Budget(limit)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError) as e:
        raise RecordError(f"no whole archive of torch.save: {e}") from e
    records = {r.filename: r for r in archive.infolist()}
    if any(r.compress_type != zipfile.ZIP_STORED for r in records.values()):
        raise RecordError("the archive is compressed, which torch.save never does; it was refused")
    if (claimed := sum(r.file_size for r in records.values())) > size:
        raise RecordError(f"the archive claims {claimed} bytes of records in {size} bytes of file")
    stems = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")]
    if len(stems) != 1:
        raise RecordError("no archive of torch.save: it holds no data.pkl")
    stem = stems[0]
    if records[f"{stem}data.pkl"].file_size > limit:
        raise RecordError(too_large("the pickle in the archive has", limit))
    if f"{stem}byteorder" in records and archive.read(f"{stem}byteorder") != b"little":
        raise RecordError("the tensors were written on a big-endian machine")

    opened: dict[object, Storage] = {}

    def storage(about: Any) -> Storage | Inert:
        kind, dtype, key, _, elements = about
        if kind == "storage" and isinstance(dtype, Inert):  # of numbers that no log has: float8, complex, quantized
            return dtype
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise RecordError("the file refers to something that is no storage of a tensor")
        record = records[f"{stem}data/{key}"]
        if not 0 <= elements * dtype.itemsize <= record.file_size:
            raise RecordError(f"storage {key} claims {elements} elements of {dtype}, and has {record.file_size} bytes")
        if key not in opened:
            opened[key] = Storage(archive, record, dtype, elements, budget)
        return opened[key]

    return decode(archive.read(f"{stem}data.pkl"), _TORCH, budget, storage, inert=True)


@dataclass
class Storage:
    """Place of a tensor's elements in a `torch.save` archive."""

    archive: zipfile.ZipFile
    record: zipfile.ZipInfo
    dtype: torch.dtype
    elements: int
    budget: Budget
    loaded: Tensor | None = None

    def flat(self) -> Tensor:
        """All of it, read once; the archive's checksum is verified."""
        if self.loaded is None:
            self.budget.spend(self.record.file_size)
            raw = bytearray(self.archive.read(self.record))
            kind = torch.uint8 if self.dtype == torch.bool else self.dtype
            flat = torch.frombuffer(raw, dtype=kind, count=self.elements)
            self.loaded = flat != 0 if self.dtype == torch.bool else flat
        return self.loaded

    def tensor(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Stored:
        """A view of it, to be read later; `RecordError` if it is not inside."""
        count = math.prod(size)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        inside = count == 0 or max(last + 1, count) <= self.elements
        if min(offset, *size, *stride, 0) < 0 or not inside:
            raise RecordError(
                f"a tensor of shape {size} and strides {stride} has {count} elements, its storage "
                f"{self.elements}; it was refused. Call .contiguous() before torch.save"
            )

        def read() -> Tensor:
            return self.flat().as_strided(size, stride, offset) if count else torch.empty(size, dtype=self.dtype)

        return Stored(read, size)


def _rebuilt(storage: Storage | Inert, offset: int, size: Any, stride: Any, *_: object) -> Stored | Inert:
    return storage if isinstance(storage, Inert) else storage.tensor(offset, tuple(size), tuple(stride))


_TORCH: Mapping[tuple[str, str], object] = MappingProxyType({
    **_BUILTIN,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    **{("torch", f"{name}Storage"): dtype for name, dtype in DTYPES.items()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
})  # fmt: skip


def tensor_of(stated: Any, limit: int = LIMIT) -> Tensor:
    """A tensor from SkyRL's own serialization of it."""
    if stated.get("format") == "torch":
        return plain(load_torch(io.BytesIO(stated["data"]), limit))
    flat = np.frombuffer(stated["data"], dtype=np.dtype(stated["dtype"]))
    return torch.from_numpy(flat.reshape(stated["shape"]).copy())
