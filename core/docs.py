"""Generate docs/hooks.md from the hooks and their contracts: `python -m core.docs`, or `--check` to compare.

Signatures, fields and their comments are shown as the source has them. Imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from core import api_version, hookspecs
from core.capabilities import FACTS, WORDS
from core.components import CHAINS, GROUPS, PARTS, STAGES, hook_of
from core.contracts import CONTRACTS
from core.hookspecs import API_VERSION, PROJECT, SINCE

TARGET = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"
FIRST_API = "1.0"
EXAMPLE = "Example::"
SHARED = ("core.request:GrammarSpec", "core.batch:SampledRow")
"""Records that contracts of several groups name, shown in full."""
RECORDS = ("core/request.py", "core/batch.py", "core/outputs.py")


def hooks() -> list[Callable[..., Any]]:
    """The hook specs in the order they stand in the file, which is request order."""
    found = [fn for _, fn in inspect.getmembers(hookspecs, inspect.isfunction) if hasattr(fn, f"{PROJECT}_spec")]
    return sorted(found, key=lambda fn: fn.__code__.co_firstlineno)


def signature(fn: Callable[..., Any]) -> str:
    return f"{fn.__name__}{inspect.signature(fn)}".replace("'", "")


def example(documented: object) -> str:
    """The code of its docstring's example, or ""."""
    return inspect.cleandoc((inspect.getdoc(documented) or "").partition(EXAMPLE)[2])


def prose(documented: object) -> str:
    """Its docstring up to the example."""
    return (inspect.getdoc(documented) or "").partition(EXAMPLE)[0].rstrip()


def contract(group: str) -> type:
    """The Protocol of a group's components."""
    return _found(CONTRACTS[group].protocol)


def context(group: str) -> type:
    """What the constructor of a group's components is given, by the contract's example."""
    protocol = contract(group)
    named = re.search(r"context: (\w+)\)", example(protocol))
    assert named is not None, f"the example of {protocol.__name__} takes no context"
    found: type = getattr(sys.modules[protocol.__module__], named[1])
    return found


def render() -> str:
    """The page as Markdown."""
    parts = [
        "# Hooks",
        "Generated from `core/hookspecs.py` and the contracts by `make docs`; do not edit.",
        inspect.getdoc(hookspecs) or "",
        _overview(),
        "## API versions",
        f"This is API {API_VERSION}.",
        _api_versions(),
        "## Component",
        prose(hookspecs.Component),
        _code(source(hookspecs.Component)),
        "Facts that `accepts` may name:",
        _list(FACTS.items()),
    ]
    groups = {hook_of(group): group for group in (*GROUPS, *CHAINS)}
    for fn in hooks():
        parts += [f"## `{signature(fn)}`", f"Since API {SINCE.get(fn.__name__, FIRST_API)}. {prose(fn)}"]
        parts.append(_code(example(fn)))
        if fn.__name__ in groups:
            parts += _contract(groups[fn.__name__])
    parts += ["## Records of several contracts", *(_code(source(_found(path), keep_docstring=True)) for path in SHARED)]
    parts += [
        "What renderers, detokenizers and processors use of `core.model.tokenizer.Tokenizer`:",
        _code(_tokenizer()),
    ]
    return "\n\n".join(parts) + "\n"


def _tokenizer() -> str:
    """Its public methods, without their bodies."""
    cls = _found("core.model.tokenizer:Tokenizer")
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    shown = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    for one in shown:
        text = ast.get_docstring(one)
        said = [ast.Expr(ast.Constant(text))] if text else []
        one.body = [*said, ast.Expr(ast.Constant(...))]
    return "class Tokenizer:\n" + textwrap.indent("\n\n".join(map(ast.unparse, shown)), "    ")


def _overview() -> str:
    return "\n".join(
        [
            f"- Stages, one component of each: {_names(STAGES)}.",
            f"- Parts that they use, one component of each: {_names(PARTS)}.",
            f"- Chains, any number of components: {_names(CHAINS)}.",
            f"- Records that contracts share, with a comment at each field: {_names(RECORDS)}.",
        ]
    )


def _api_versions() -> str:
    """The docstring of API_VERSION, which Python does not keep, and the table of what came later."""
    body = ast.parse(inspect.getsource(api_version)).body
    after = next(
        body[index + 1]
        for index, node in enumerate(body)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "API_VERSION"
    )
    assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    text = str(after.value.value).partition("\n")[2].strip().rpartition("\n\n")[0]
    return f"{text}\n\nNewer than {FIRST_API}:\n\n{_list((f'`{what}`', since) for what, since in SINCE.items())}"


def _contract(group: str) -> Iterator[str]:
    protocol, made = contract(group), context(group)
    yield f"### `{protocol.__module__}.{protocol.__name__}`"
    yield prose(protocol)
    yield _code(source(protocol))
    words = [(name.partition(".")[2], text) for name, text in WORDS.items() if name.partition(".")[0] == group]
    if words:
        yield f"Words that a component of `{group}` may provide, and others name as `{group}.word`:"
        yield _list(words)
    yield f"What its constructor is given as `context`, and what else `{protocol.__module__}` has for it:"
    for cls in (made, *_related(group)):
        yield _code(source(cls, keep_docstring=True))
    yield f"A complete component; its suite is `{CONTRACTS[group].suite.replace(':', '.')}`:"
    yield _code(example(protocol))


def source(cls: type, *, keep_docstring: bool = False) -> str:
    """A class as it stands in its file."""
    text = textwrap.dedent(inspect.getsource(cls)).rstrip()
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.ClassDef)
    first, lines = node.body[0], text.splitlines()
    if keep_docstring or not ast.get_docstring(node) or len(node.body) == 1:
        return text
    assert first.end_lineno is not None
    return "\n".join([*lines[: first.lineno - 1], *lines[first.end_lineno :]]).replace(":\n\n", ":\n", 1)


def _related(group: str) -> list[type]:
    """Protocols and records of the contract's module that it names, its context, or one of these."""
    protocol = contract(group)
    others = {*map(contract, CONTRACTS), *map(context, CONTRACTS)}
    module, found = sys.modules[protocol.__module__], [protocol, context(group)]
    for cls in found:  # grows while it is walked
        for node in ast.walk(ast.parse(source(cls))):
            value = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
            members = value.__args__ if isinstance(value, UnionType) else (value,)
            found += [one for one in members if _belongs(one, module.__name__) and one not in {*found, *others}]
    return found[2:]


def _belongs(value: object, module: str) -> bool:
    if not isinstance(value, type) or not value.__module__.startswith("core."):
        return False
    is_record = dataclasses.is_dataclass(value) and value.__module__ == module
    return is_record or bool(getattr(value, "_is_protocol", False))


def _found(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _list(rows: Any) -> str:
    return "\n".join(f"- {name if name.startswith('`') else f'`{name}`'}: {text}" for name, text in rows)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def main(arguments: Sequence[str]) -> int:
    page = render()
    if "--check" not in arguments:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page:
        print(f"{TARGET} is stale; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
