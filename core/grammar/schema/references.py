"""Where the schemas of a document are, by `$id`, `$anchor` and pointer. Nothing outside the document is looked at, ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from core.grammar.schema.limits import malformed, refuse
from core.grammar.schema.places import below, escaped

ROOT = "schema:/"
"""The base of references in a document without an `$id`."""


@dataclass(slots=True)
class Resource:
    """A schema with a URI of its own, and the anchors in it."""

    uri: str
    schema: Any
    anchors: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Location:
    """A schema where it stands, as it was come to."""

    schema: Any
    pointer: str  # from the document's root, for messages
    base: str  # URI of its resource
    scope: tuple[str, ...] = ()  # resources on the way here, outermost first; () where no dynamic reference could ask

    @property
    def key(self) -> tuple[object, ...]:
        return (id(self.schema), self.base, self.scope)


class Document:
    """All schemas of one document, which lives as long as this."""

    def __init__(self, schema: Any):
        self._resources: dict[str, Resource] = {}
        self._pointers: dict[int, tuple[str, str]] = {}  # by id of a schema: pointer and base
        self._is_dynamic = False
        self.base = ROOT
        if isinstance(schema, dict):
            self.base = self._identified(schema, ROOT, "#")
        self._resources.setdefault(self.base, Resource(self.base, schema))
        self._read(schema)
        scope = (self.base,) if self._is_dynamic else ()
        self.root = Location(schema, "#", self.base, scope)

    def _identified(self, schema: dict[str, Any], base: str, pointer: str) -> str:
        own = schema.get("$id")
        if own is None or (isinstance(own, str) and own.startswith("#")):
            return base
        if not isinstance(own, str):
            malformed("$id", pointer, "a URI")
        return _joined(base, own, pointer, "$id")

    def _read(self, root: Any) -> None:
        left = [("#", root, ROOT)]
        while left:
            pointer, schema, base = left.pop()
            if not isinstance(schema, dict):
                continue
            inner = self._identified(schema, base, pointer)
            if inner != base or schema is root:
                base = inner
                self._resources.setdefault(base, Resource(base, schema))
            self._pointers[id(schema)] = (pointer, base)
            self._anchored(schema, base)
            left += [("/".join((pointer, *map(escaped, path))), one, base) for path, one in below(schema)]

    def _anchored(self, schema: dict[str, Any], base: str) -> None:
        resource = self._resources[base]
        if isinstance(anchor := schema.get("$anchor"), str):
            resource.anchors.setdefault(anchor, schema)
        if isinstance(own := schema.get("$id"), str) and own.startswith("#"):  # as drafts before 2019-09 write anchors
            resource.anchors.setdefault(own[1:], schema)
        if isinstance(anchor := schema.get("$dynamicAnchor"), str):
            resource.anchors.setdefault(anchor, schema)
            resource.dynamic.setdefault(anchor, schema)
        self._is_dynamic = self._is_dynamic or "$dynamicRef" in schema

    def below(self, parent: Location, schema: Any, *path: str) -> Location:
        """The schema at `path` inside `parent`'s."""
        pointer = "/".join((parent.pointer, *map(escaped, path)))
        base = self._pointers.get(id(schema), ("", parent.base))[1] if isinstance(schema, dict) else parent.base
        return Location(schema, pointer, base, self._entered(parent.scope, base))

    def _entered(self, scope: tuple[str, ...], base: str) -> tuple[str, ...]:
        """A resource that is entered again stays where it is: who asks looks for the outermost."""
        return (*scope, base) if self._is_dynamic and base not in scope else scope

    def referred(self, at: Location, reference: Any) -> Location:
        """What `$ref` leads to. Raises GrammarError."""
        schema, base = self._found(at, reference, "$ref")
        return self._located(schema, base, at.scope)

    def dynamically_referred(self, at: Location, reference: Any) -> Location:
        schema, base = self._found(at, reference, "$dynamicRef")
        name = urldefrag(str(reference))[1]
        if isinstance(schema, dict) and name and schema.get("$dynamicAnchor") == name:
            for uri in self._entered(at.scope, base):
                found = self._resources[uri].dynamic.get(name)
                if found is not None:
                    return self._located(found, uri, at.scope)
        return self._located(schema, base, at.scope)

    def _located(self, schema: Any, base: str, scope: tuple[str, ...]) -> Location:
        pointer, own = self._pointers.get(id(schema), ("#", base))
        return Location(schema, pointer, own, self._entered(scope, own))

    def _found(self, at: Location, reference: Any, keyword: str) -> tuple[Any, str]:
        if not isinstance(reference, str):
            malformed(keyword, at.pointer, "a URI")
        uri, fragment = urldefrag(_joined(at.base, reference, at.pointer, keyword))
        resource = self._resources.get(uri)
        if resource is None:
            refuse(keyword, at.pointer, "it leads outside of the schema, and nothing is fetched")
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointed(resource, fragment, at, keyword), uri
        if fragment not in resource.anchors:
            malformed(keyword, at.pointer, "a reference to a schema that is there")
        return resource.anchors[fragment], uri

    def _pointed(self, resource: Resource, pointer: str, at: Location, keyword: str) -> Any:
        schema = resource.schema
        for part in pointer.split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and step in schema:
                schema = schema[step]
            elif isinstance(schema, list) and _is_index(step) and int(step) < len(schema):
                schema = schema[int(step)]
            else:
                malformed(keyword, at.pointer, "a reference to a schema that is there")
        if not isinstance(schema, dict | bool):
            malformed(keyword, at.pointer, "a reference to a schema")
        return schema


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdecimal() and len(step) < 10  # more digits than any list has items


def _joined(base: str, reference: str, pointer: str, keyword: str) -> str:
    try:
        joined = urljoin(base, reference) if not reference.startswith("#") else urldefrag(base)[0] + reference
        return joined.removesuffix("#")
    except ValueError:
        malformed(keyword, pointer, "a URI")
