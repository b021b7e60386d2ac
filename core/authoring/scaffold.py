"""Write a complete plugin package: `plugins new my-plugin --stage scheduler`.

A template is source text in which `acme_word`, `AcmeWord` and `acme-word` stand for the new package's names.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from core.authoring.kinds import KINDS, Kind
from core.components import CHAINS, hook_of
from core.contracts import CONTRACTS
from core.errors import ConfigError, near_matches
from core.hookspecs import API_VERSION
from core.version import nonet_version

TEMPLATES = files("core.authoring") / "templates"
LEGAL = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SETTINGS_ROW = "| `acme_word/settings.py` | its settings, in a module without torch, so that config is checked fast |\n"
RESERVED = ("core", "plugins", "configs", "tests", "nonet")


def write_package(distribution: str, group: str, folder: Path) -> Path:
    """Write the package into `folder`/`distribution`, which must not exist. Returns that path. Raises ConfigError."""
    kind = kind_of(group)
    _check_name(distribution)
    target = folder / distribution
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another name, or another --dir")
    words = _words(distribution, kind)
    for path, text in _files(kind):
        place = target / _replaced(path, words)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--dir={folder}: {error.strerror}: {error.filename}") from error
        lines = [line.rstrip() for line in _replaced(text, words).rstrip("\n").split("\n")]
        place.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def kind_of(group: str) -> Kind:
    """Raises ConfigError with near matches; `observer` and `logits_processor` are understood."""
    known = {**KINDS, **{name.rstrip("s"): KINDS[name] for name in CHAINS}}
    if group not in known:
        raise ConfigError(f"no stage is called {group!r}{near_matches(group, KINDS)}")
    return known[group]


def _check_name(distribution: str) -> None:
    if not LEGAL.fullmatch(distribution) or distribution in RESERVED:
        raise ConfigError(
            f"{distribution!r} is no name for a package: write small letters, digits and '-', as in acme-turns "
            f"(and none of {', '.join(RESERVED)})"
        )
    module = distribution.replace("-", "_")
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise ConfigError(f"{module} is a module already, which the package would hide; choose another name")


def _words(distribution: str, kind: Kind) -> dict[str, str]:
    module = distribution.replace("-", "_")
    chain = kind.group in CHAINS
    suite, _, contract = CONTRACTS[kind.group].suite.partition(":")
    select = f"{kind.group}.{module}={{}}" if chain else f"{kind.group}={module}"
    select = f"{kind.group}=[{module},{kind.is_first}]" if kind.is_first else select
    major, minor = nonet_version().split(".")[:2]
    return {
        "acme-word": distribution,
        "acme_word": module,
        "AcmeWord": "".join(word.capitalize() for word in distribution.split("-")),
        "{{group}}": kind.group,
        "{{hook}}": hook_of(kind.group),
        "{{summary}}": kind.summary,
        "{{key}}": f"{kind.group}.{module}" if chain else kind.group,
        "{{settings_row}}": SETTINGS_ROW if any("settings=" in line for line in kind.declares) else "",
        "{{declares}}": "".join(f"        {line},\n" for line in kind.declares),
        "{{suite}}": suite,
        "{{contract}}": contract,
        "{{std_imports}}": "".join(f"{line}\n" for line in kind.std_imports),
        "{{more_imports}}": "".join(f"{line}\n" for line in kind.test_imports),
        "{{words}}": "\n".join(f"    {line}" for line in (*_provided(kind), *kind.words)),
        "{{api}}": API_VERSION,
        "{{nonet}}": f"nonet>={major}.{minor},<{major}.{int(minor) + 1}",
        "{{select}}": select,
        "{{selecting}}": ", ".join(f'"{word}"' for word in (*kind.beside, select)),
        "{{shell}}": shlex.join((*kind.beside, select)),
        "{{yaml}}": f"{module}: {{}}" if chain else f"name: {module}",
        "{{part}}": f'chain("{kind.group}")[{0 if kind.is_first else -1}]' if chain else f'part("{kind.group}")',
    }


def _provided(kind: Kind) -> list[str]:
    """What the contract's class must know of what its component provides, as a line of source text."""
    found = [line.removeprefix("provides=(").rstrip("),") for line in kind.declares if line.startswith("provides=")]
    return [f"provides = frozenset({{{words}}})  # as in its Component" for words in found]


def _replaced(text: str, words: dict[str, str]) -> str:
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    while (new := pattern.sub(lambda found: words[found[0]], text)) != text:  # a word's text may hold another word
        text = new
    return text


def _files(kind: Kind) -> Iterator[tuple[str, str]]:
    """(path in the package, text): what every package has, then what this group adds."""
    for path, template in _walk(TEMPLATES / "package"):
        yield path, template.read_text(encoding="utf-8")
    for path, template in _walk(TEMPLATES / kind.group):
        name = path.rpartition("/")[2]
        place = f"tests/{name.replace('.py', '_acme_word.py')}" if name.startswith("test_") else f"acme_word/{name}"
        yield place.replace("component.py", f"{kind.group}.py"), template.read_text(encoding="utf-8")


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".txt"):
            yield prefix + entry.name.removesuffix(".txt"), entry
