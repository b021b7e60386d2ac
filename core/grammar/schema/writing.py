"""Formulas written as one schema, shared and recursive ones as `$defs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from core.grammar.schema.array_forms import ArrayForm
from core.grammar.schema.forms import Form, SimpleForm, forms_of
from core.grammar.schema.formulas import Formula
from core.grammar.schema.shapes import KINDS
from core.grammar.schema.solver import Solver
from core.stages.grammar import GrammarError

Written = dict[str, Any] | bool


class Writer:
    def __init__(self, solver: Solver):
        self._solver = solver
        self._true, self._false = solver.formulas.true, solver.formulas.false
        self._limits = solver.tools.limits
        self._forms: dict[Formula, list[Form]] = {}
        self._alive: set[Formula] = {self._true}
        self._names: dict[Formula, str] = {}  # of $defs
        self._size = 0

    def write(self, root: Formula) -> dict[str, Any]:
        """Raises GrammarError, also where no value satisfies `root`."""
        uses = self._explore(root)
        self._find_alive()
        if root not in self._alive:
            raise GrammarError(f"the schema is not supported: no value of finite size satisfies {self._dead_end(root)}")
        shared = [one for one, count in uses.items() if count > 1 and one in self._alive and not self._is_small(one)]
        self._names = {formula: f"d{at}" for at, formula in enumerate(shared)}
        written = self._written(root)
        if not isinstance(written, dict):
            return {}
        definitions = {name: self._body(formula) for formula, name in self._names.items()}
        return {**written, "$defs": definitions} if definitions else written

    def _explore(self, root: Formula) -> Counter[Formula]:
        uses, left = Counter({root: 1}), [root]
        while left:
            formula = left.pop()
            if formula is self._true or formula is self._false:
                continue
            forms = self._forms[formula] = forms_of(self._solver, formula)
            for below in (one for form in forms for one in _inside(form)):
                uses[below] += 1
                if uses[below] == 1:
                    left.append(below)
            if len(self._forms) > self._limits.max_formulas:
                raise GrammarError("a schema with so many cases is not supported")
        return uses

    def _find_alive(self) -> None:
        """Formulas that some finite value satisfies: the least set in which each has a form with what it needs."""
        left, known = [*reversed(self._forms)], -1
        while known != len(self._alive):
            known = len(self._alive)
            self._alive |= {one for one in left if any(map(self._is_possible, self._forms[one]))}
            left = [one for one in left if one not in self._alive]

    def _dead_end(self, formula: Formula) -> str:
        """The innermost schema that nothing satisfies, of those that a value needs."""
        seen, where = {formula}, "#"
        while True:
            where = formula.location.pointer if formula.location is not None else where
            needed = (one for form in self._forms.get(formula, ()) for one in _needed(form))
            below = next((one for one in needed if one not in self._alive and one not in seen), None)
            if below is None:
                return where
            seen.add(below)
            formula = below

    def _is_possible(self, form: Form) -> bool:
        if isinstance(form, SimpleForm):
            return True
        if not all(one in self._alive for one in _needed(form)):
            return False
        if isinstance(form, ArrayForm) or form.low <= len(form.required):
            return True
        return form.others in self._alive or any(one in self._alive for one in form.patterns.values())

    def _is_small(self, formula: Formula) -> bool:
        forms = self._forms.get(formula, [])
        return len(forms) < 2 and all(isinstance(form, SimpleForm) and len(str(form.schema)) < 64 for form in forms)

    def _written(self, formula: Formula) -> Written:
        if formula not in self._alive:
            return False
        if formula in self._names:
            return {"$ref": f"#/$defs/{self._names[formula]}"}
        return self._body(formula)

    def _body(self, formula: Formula) -> Written:
        if formula is self._true:
            return True
        forms = [form for form in self._forms[formula] if self._is_possible(form)]
        options = list(_with_one_type(self._schema(form) for form in forms))
        self._size += len(options)
        if self._size > self._limits.max_output:
            raise GrammarError("a schema that becomes so large is not supported")
        if len(options) == 1:
            return True if options[0] == {"type": list(KINDS)} else options[0]
        return {"anyOf": options}

    def _schema(self, form: Form) -> dict[str, Any]:
        if isinstance(form, SimpleForm):
            return form.schema
        if isinstance(form, ArrayForm):
            return self._array(form)
        found: dict[str, Any] = {"type": "object"}
        others = self._written(form.others)
        patterns = {pattern: self._written(one) for pattern, one in form.patterns.items()}
        is_closed = others is False and not any(patterns.values())
        properties = {name: self._written(one) for name, one in form.properties.items()}
        properties = {name: one for name, one in properties.items() if one is not False or not is_closed}
        self._size += 1 + len(properties) + len(patterns)
        found |= {"properties": properties} if properties else {}
        found |= {"required": [name for name in properties if name in form.required]} if form.required else {}
        found |= {"patternProperties": patterns} if patterns and not is_closed else {}
        found |= {"additionalProperties": others} if others is not True else {}
        found |= {"minProperties": form.low} if form.low else {}
        return found | ({"maxProperties": form.high} if form.high is not None else {})

    def _array(self, form: ArrayForm) -> dict[str, Any]:
        prefix = [self._written(one) for one in form.prefix]
        rest: Written = self._written(form.rest)
        if False in prefix:
            prefix, rest = prefix[: prefix.index(False)], False
        self._size += 1 + len(prefix)
        found: dict[str, Any] = {"type": "array"}
        found |= {"prefixItems": prefix} if prefix else {}
        found |= {"items": rest} if rest is not True else {}
        found |= {"minItems": form.low} if form.low else {}
        return found | ({"maxItems": form.high} if form.high is not None and rest is not False else {})


def _needed(form: Form) -> Iterator[Formula]:
    """What is inside every value of the form."""
    if isinstance(form, ArrayForm):
        yield from form.prefix[: form.low]
        if form.low > len(form.prefix):
            yield form.rest
    elif not isinstance(form, SimpleForm):
        yield from (form.properties[name] for name in form.properties if name in form.required)


def _inside(form: Form) -> Iterator[Formula]:
    if isinstance(form, ArrayForm):
        yield from (*form.prefix, form.rest)
    elif not isinstance(form, SimpleForm):
        yield from (*form.properties.values(), *form.patterns.values(), form.others)


def _with_one_type(schemas: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Schemas that say a type alone become one with a list of types."""
    types = list[str]()
    for schema in schemas:
        if schema.keys() == {"type"}:
            types.append(schema["type"])
        else:
            yield schema
    if types:
        yield {"type": types[0] if len(types) == 1 else [kind for kind in KINDS if kind in types] + _integer(types)}


def _integer(types: list[str]) -> list[str]:
    return ["integer"] if "integer" in types and "number" not in types else []
