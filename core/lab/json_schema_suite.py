"""The JSON-Schema-Test-Suite through the grammar backends: does a schema compile, and are the right values let out?

Project: json-schema-org/JSON-Schema-Test-Suite (MIT), as the sdist of `jsonschema` has it. A case passes where its schema
compiles and a text of its value is accepted exactly if the value is valid. A value has many texts, and a grammar fixes the
order of properties: a valid value has to have one text that is accepted, an invalid one must have none. Texts tried are those
of `json.dumps` with each order of keys (up to a bound), with whole floats as integers too; for invalid values also with
characters written as escapes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, permutations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.grammar.schema.normalise import normalise
from core.lab.grammar_judge import ByteBackends, Judge, llguidance_alone
from core.stages.grammar import GrammarError

SDIST = "jsonschema==4.26.0"
DRAFT = "draft2020-12"
FORMATS = "optional/format/"
"""Files of this folder are about `format` as an assertion."""
RATCHET = Path(__file__).parents[2] / "tests" / "data" / "json_schema_ratchet.json"
"""What became of each case, by llguidance behind `core.grammar.schema`: it may only become better."""
MAX_TEXTS = 200
MAX_ORDERS = 24  # of the keys of one object


class Verdict(StrEnum):
    """The letters stand in the ratchet file."""

    PASSED = "p"
    FALSE_NEGATIVE = "n"  # a valid value is refused
    REFUSED = "r"  # the schema is
    FALSE_POSITIVE = "w"
    CRASH = "c"


BEST_FIRST = tuple(Verdict)
NAMES = {
    Verdict.PASSED: "pass",
    Verdict.FALSE_NEGATIVE: "false negative",
    Verdict.REFUSED: "refused",
    Verdict.FALSE_POSITIVE: "false positive",
    Verdict.CRASH: "crash",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A schema, and values with whether they are valid."""

    file: str  # below the draft's folder
    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


Results = dict[str, dict[str, str]]
"""By file and group: a letter of `Verdict` for each test in order."""
Compile = Callable[[Any, bool], Judge]
"""(schema, whether `format` is an assertion). Raises GrammarError where it is refused."""


def read_groups(folder: Path) -> Iterator[Group]:
    """`folder`: that of the suite, with `tests` in it."""
    root = folder / "tests" / DRAFT
    for path in sorted(root.rglob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            tests = tuple((test["data"], test["valid"]) for test in group["tests"])
            yield Group(path.relative_to(root).as_posix(), group["description"], group["schema"], tests)


@contextmanager
def fetched_suite() -> Iterator[Path]:
    """The suite's folder, by pip from the package index."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", folder, SDIST]
        subprocess.run(pip, check=True, capture_output=True, timeout=300)
        archive = next(Path(folder).glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        yield next(Path(folder).glob("*/json"))


def run(groups: Iterable[Group], compile_schema: Compile) -> Results:
    found: Results = {}
    for group in groups:
        verdicts = "".join(_verdicts(group, compile_schema))
        known = found.setdefault(group.file, {})
        known[group.name] = known.get(group.name, "") + verdicts  # a name may be there twice
    return found


def _verdicts(group: Group, compile_schema: Compile) -> list[Verdict]:
    try:
        judge = compile_schema(group.schema, group.file.startswith(FORMATS))
    except GrammarError:
        return [Verdict.REFUSED for _ in group.tests]
    except Exception:
        return [Verdict.CRASH for _ in group.tests]
    return [_verdict(judge, value, is_valid) for value, is_valid in group.tests]


def _verdict(judge: Judge, value: Any, is_valid: bool) -> Verdict:
    try:
        accepted = any(map(judge.accepts, texts(value, with_escapes=not is_valid)))
    except Exception:
        return Verdict.CRASH
    if accepted == is_valid:
        return Verdict.PASSED
    return Verdict.FALSE_POSITIVE if accepted else Verdict.FALSE_NEGATIVE


def texts(value: Any, with_escapes: bool) -> Iterator[str]:
    for same in islice(_orders(value), MAX_TEXTS):
        yield json.dumps(same, ensure_ascii=False)
        if with_escapes:
            yield json.dumps(same)
            yield from (_escaped(same, only_keys) for only_keys in (True, False))


def _orders(value: Any) -> Iterator[Any]:
    """`value` with its keys in each order, and whole floats as integers: the same value in JSON Schema."""
    if isinstance(value, dict):
        for keys in islice(permutations(value), MAX_ORDERS):
            below = (list(islice(_orders(value[key]), MAX_ORDERS)) for key in keys)
            yield from (dict(zip(keys, items, strict=True)) for items in product(*below))
    elif isinstance(value, list):
        yield from map(list, product(*(list(islice(_orders(item), MAX_ORDERS)) for item in value)))
    else:
        yield value
        if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
            yield int(value)


def _escaped(value: Any, only_keys: bool) -> str:
    """Every character of every key, and of every string, as an escape."""
    if isinstance(value, dict):
        members = (f"{_escaped_text(key)}: {_escaped(item, only_keys)}" for key, item in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_escaped(item, only_keys) for item in value) + "]"
    return _escaped_text(value) if isinstance(value, str) and not only_keys else json.dumps(value, ensure_ascii=False)


def _escaped_text(text: str) -> str:
    data = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2)) + '"'


def count(results: Results) -> Counter[Verdict]:
    return Counter(Verdict(letter) for groups in results.values() for letters in groups.values() for letter in letters)


def worse(results: Results, ratchet: Results) -> list[str]:
    """What has become worse than in `ratchet`, and what neither of them knows."""
    return [
        f"{name}: {NAMES[was]}, now {NAMES[now]}"
        for name, was, now in _changes(results, ratchet)
        if _rank(now) > _rank(was)
    ]


def better(results: Results, ratchet: Results) -> int:
    return sum(_rank(now) < _rank(was) for _, was, now in _changes(results, ratchet))


def _rank(verdict: Verdict) -> int:
    return BEST_FIRST.index(verdict)


def _changes(results: Results, ratchet: Results) -> Iterator[tuple[str, Verdict, Verdict]]:
    """A test that the ratchet does not know counts as one that was refused."""
    for file, groups in results.items():
        for name, letters in groups.items():
            known = ratchet.get(file, {}).get(name, "").ljust(len(letters), Verdict.REFUSED)
            for at, (was, now) in enumerate(zip(known, letters, strict=False)):
                yield f"{file}: {name}, test {at}", Verdict(was), Verdict(now)


def read_ratchet(path: Path) -> Results:
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_ratchet(path: Path, results: Results) -> None:
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(results: Mapping[str, Results]) -> str:
    """By who ran it: how many cases of each part of the suite ended how."""
    lines = [f"{'':24}" + "".join(f"{NAMES[verdict]:>16}" for verdict in BEST_FIRST)]
    for who, found in results.items():
        for part in ("required", "optional", "format"):
            counts = count({file: groups for file, groups in found.items() if _part(file) == part})
            total = max(sum(counts.values()), 1)
            lines.append(f"{who:14}{part:10}" + "".join(f"{counts[verdict]:16}" for verdict in BEST_FIRST))
            lines[-1] += f"   {counts[Verdict.PASSED] / total:6.1%} of {total:,}"
    return "\n".join(lines)


def _part(file: str) -> str:
    if file.startswith(FORMATS):
        return "format"
    return "optional" if file.startswith("optional/") else "required"


def through(names: Sequence[str]) -> Compile:
    """The way that a request's schema takes, with these backends in this order."""
    backends = ByteBackends(names)

    def compile_schema(schema: Any, asserts_formats: bool) -> Judge:
        return backends.judge(normalise(schema, formats="assertion") if asserts_formats else schema)

    return compile_schema


def alone(schema: Any, _: bool) -> Judge:
    return llguidance_alone(schema)


def main(arguments: Sequence[str]) -> int:
    """`python -m core.lab.json_schema_suite FOLDER [BACKEND …] [--update]`: the table, what is not passed, and the ratchet."""
    words = [word for word in arguments if word != "--update"]
    results = run(read_groups(Path(words[0])), through(words[1:] or ("llguidance",)))
    for file, groups in results.items():
        for name, letters in groups.items():
            if set(letters) != {Verdict.PASSED}:
                print(f"{letters}  {file}: {name}")
    print(table({"nonet": results}))
    if len(words) < len(arguments):
        write_ratchet(RATCHET, results)
    changed = worse(results, read_ratchet(RATCHET))
    print("\n".join(changed))
    return int(bool(changed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
