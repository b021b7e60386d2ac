"""The grammar of calls in Python's notation: a schema's properties become keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.request import GrammarSpec
from core.stages.tool_parser import AUTO
from plugins.tool_parsers.schema_rules import EMPTY, Rules, UnsupportedError, check_arguments, quoted
from plugins.tool_parsers.structures import Wording, chosen, schema_of, structural_tag

_WORDS = {True: "True", False: "False", None: "None"}
_KEYWORD = re.compile(r"[^\W\d]\w{0,63}")
_SPREAD = Wording("[{word}(**", ")]", "[", None)


def keyword_grammar(tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
    """`[f(a=1), g(b="x")]`; where a schema says what these rules do not know, `[f(**{…})]` with the schema itself for the
    dict, which needs a choice of the frontend that makes the model call.

    Content of such an answer does not begin with a bracket.
    """
    functions = chosen(tools, choice)
    schemas = [schema_of(function) for function in functions]
    if not functions or None in schemas:
        return None
    try:
        source = _ebnf(functions, schemas, parallel, with_content=choice == AUTO)
    except UnsupportedError:
        return None if choice == AUTO else structural_tag(_SPREAD, tools, choice, parallel=False)
    return GrammarSpec(kind="ebnf", source=source)


def _ebnf(functions: Sequence[Mapping[str, Any]], schemas: Sequence[Any], parallel: bool, *, with_content: bool) -> str:
    rules = Rules(_WORDS)

    def keyword(key: str, schema: Any) -> str:
        if not (_KEYWORD.fullmatch(key) and key.isidentifier()):
            raise UnsupportedError(f"{key!r} is no keyword")
        return f"{quoted(f'{key}=')} {rules.value(schema)}"

    calls = []
    for function, schema in zip(functions, schemas, strict=True):
        check_arguments(schema)
        calls.append(f'{quoted(function["name"] + "(")} {rules.members(schema, keyword, ", ")} ")"')
    call = rules.add(" | ".join(calls))
    root = f'"[" {call} {f"""(", " {call})*""" if parallel else EMPTY} "]"'
    return rules.text(f"{root} | ([^\\[ \\t\\n\\r] [^\\x00]*)?" if with_content else root)
