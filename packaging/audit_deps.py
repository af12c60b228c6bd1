"""What offdrift depends on, held to account: `make audit-deps`.

    python packaging/audit_deps.py [--advisories]

Offline, of the environment that runs it: every package that the source imports is declared, every declared one is
imported or has a reason, each has its line in docs/dependencies.md, every package that they bring is pinned in
constraints.txt at the version that is installed, and has a licence under which an Apache-2.0 package may be used with
it. `--advisories` also asks the package index for known vulnerabilities of every pin, by pip-audit, and fails if the
index cannot say: pip-audit alone calls a package that it could not look up neither safe nor unsafe, and exits with 0.
Ends with 1 if anything is wrong, and names it.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HOSTS = {"megatron", "nemo_rl", "prime_rl", "skyrl", "slime", "verl", "trl"}
"""Frameworks whose own process imports an adapter: they are there, or the adapter is not used."""
OPTIONAL = {
    "triton": "comes with CUDA builds of torch",
    "vllm": "an engine that a recipe names; its CPU build cannot be installed with its own requirements (Makefile)",
}
"""Modules imported where they are there, which no extra asks for."""
BROUGHT = {"markupsafe": "jinja2", "tokenizers": "transformers"}
"""Modules of which we use types, and the declared package that cannot be without them."""
UNIMPORTED = {
    "gguf": "transformers imports it to read weights in that format",
    "s3fs": "fsspec imports it for s3:// URLs",
    "tensorboard": "accelerate imports it as the tracker that is on by default",
    "trl": "its process imports our adapter",
    "verl": "its process imports our adapter",
}
"""Declared and not imported in the source, and why."""
PERMISSIVE = re.compile(
    r"\b(apache|mit|bsd|iscl?|psf|python software foundation|unlicense|zlib|0bsd|cc0|bsl-1\.0|cnri|hpnd)\b", re.I
)
WEAK = re.compile(r"\b(mpl|mozilla public)\b", re.I)
"""Copyleft of its own files alone: used unchanged, as here, it asks nothing of us."""
TEXTS = {
    "Permission is hereby granted, free of charge": "MIT",
    "Redistribution and use in source and binary forms": "BSD",
    "Apache License": "Apache-2.0",
}
"""Licences by a phrase of their text, for packages whose metadata names none."""
RUNTIME = ("cli", "audit", "ray", "s3", "plan", "train", "trl")
"""Extras whose packages users get; verl's is left out: its wheel is installed without its requirements here."""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def declared(table: Mapping, extras: Iterable[str] | None = None) -> set[str]:
    """Packages that pyproject.toml names: the core's, and those of the extras (all, without a choice)."""
    named = table["optional-dependencies"]
    lines = [*table["dependencies"], *(line for extra in (extras or named) for line in named[extra])]
    return {canonicalize_name(Requirement(line).name) for line in lines} - {"offdrift"}


def imported(source: Path) -> dict[str, str]:
    """Third-party modules that the source imports, wherever the import stands, each with a file that does."""
    where: dict[str, str] = {}
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"offdrift", "offdrift_lab"}:
                where.setdefault(top, str(file.relative_to(source)))
    return where


def imports(source: Path, table: Mapping) -> Iterator[str]:
    """Imports without a declaration, and declarations without an import or a reason."""
    modules, owners = imported(source), packages_distributions()
    wanted = declared(table, RUNTIME)
    used = set()
    for module, file in modules.items():
        owner = {canonicalize_name(name) for name in owners.get(module, [module])}
        used |= owner
        if not owner & wanted and module not in {*HOSTS, *OPTIONAL} and BROUGHT.get(module) not in wanted:
            yield f"{file} imports {module}, which pyproject.toml does not declare: add it to an extra, or drop it"
    for name in sorted(wanted - used - UNIMPORTED.keys()):
        yield f"pyproject.toml declares {name}, which nothing imports: drop it, or write its reason into UNIMPORTED"


def justified(page: str, table: Mapping) -> Iterator[str]:
    """Declared packages without a line in docs/dependencies.md."""
    rows = re.findall(r"^\| ([^|]+) \|", page, re.M)
    words = {canonicalize_name(word) for row in rows for word in re.findall(r"[\w.-]+", row)}
    for name in sorted(declared(table) - words):
        yield f"docs/dependencies.md has no line for {name}: say what it is for"


def closure(names: Iterable[str]) -> dict[str, Distribution | None]:
    """The packages and everything that they bring on this interpreter; None for those that are not installed."""
    everything: dict[str, Distribution | None] = {}
    waiting = [(canonicalize_name(name), frozenset()) for name in names]
    seen_as: set[tuple[str, frozenset]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen_as:
            continue
        seen_as.add((name, extras))
        try:
            everything[name] = package = distribution(name)
        except PackageNotFoundError:
            everything[name] = None
            continue
        for line in package.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return everything


def pinned(packages: Mapping[str, Distribution | None], constraints: str) -> Iterator[str]:
    """Packages that constraints.txt does not pin, or pins at another version than the one that is installed."""
    pins = {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==([^\s;#]+)", constraints, re.M)}
    for name, package in sorted(packages.items()):
        version = package.version.split("+")[0] if package else None  # +cpu is a build of the same version
        if name not in pins:
            yield f"constraints.txt does not pin {name}: add {name}=={version or 'VERSION'}"
        elif version is not None and pins[name].split("+")[0] != version:
            yield f"{name} {version} is installed and constraints.txt pins {pins[name]}: make install-test"


def licence(package: Distribution) -> str:
    """A package's licence: by its expression, its classifiers, its old field or the text that it ships."""
    about = package.metadata
    classifiers = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or () if c.startswith("License ::")]
    for words in (about.get("License-Expression"), ", ".join(classifiers), about.get("License", "").split("\n")[0]):
        if words and words not in ("UNKNOWN", "OSI Approved"):
            return words
    for file in package.files or ():
        if "licen" in file.name.lower():
            text = Path(str(package.locate_file(file))).read_text("utf-8", "replace")
            return next((name for phrase, name in TEXTS.items() if phrase in text), "")
    return ""


def licences(packages: Mapping[str, Distribution | None]) -> Iterator[str]:
    """Packages whose licence is neither permissive nor weak copyleft, as far as their own words say."""
    for name, package in sorted(packages.items()):
        words = "" if package is None else licence(package)
        parts = [part for part in re.split(r"\band\b|,|\(|\)", words, flags=re.I) if part.strip()]
        alternatives = [re.split(r"\bor\b", part, flags=re.I) for part in parts]
        allowed = [any(PERMISSIVE.search(word) or WEAK.search(word) for word in part) for part in alternatives]
        if package is not None and not (allowed and all(allowed)):
            yield f"{name}: its licence is {words or 'not stated'}; look, and leave it out if Apache-2.0 cannot use it"


def offline() -> list[str]:
    """Everything that is wrong, without asking anyone."""
    table, packages = project(), closure({*declared(project(), RUNTIME)})
    return [
        *imports(ROOT / "src", table),
        *justified((ROOT / "docs/dependencies.md").read_text("utf-8"), table),
        *pinned(packages, (ROOT / "constraints.txt").read_text("utf-8")),
        *licences(packages),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advisories", action="store_true", help="also look every pin up, with pip-audit")
    options = parser.parse_args()
    wrong = offline()
    packages = closure(declared(project(), RUNTIME))
    weak = sorted(name for name, package in packages.items() if package and WEAK.search(licence(package)))
    absent = sorted(name for name, package in packages.items() if package is None)
    print(f"{len(packages)} packages for users, {len(packages) - len(absent)} of them installed and read; "
          f"weak copyleft: {', '.join(weak) or 'none'}; not installed: {', '.join(absent) or 'none'}")  # fmt: skip
    print("\n".join(wrong) or "imports, reasons, pins and licences are in order", flush=True)
    status = 0
    if options.advisories:
        if find_spec("pip_audit") is None:
            parser.error("--advisories needs pip-audit, which is not installed here: pip install pip-audit")
        words = ["--strict", "--no-deps", "--disable-pip", "--requirement", str(ROOT / "constraints.txt")]
        status = subprocess.run([sys.executable, "-m", "pip_audit", *words]).returncode
    sys.exit(1 if wrong or status else 0)


if __name__ == "__main__":
    main()
