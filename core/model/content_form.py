"""What a chat template takes as the content of a message, judged by its source as vLLM's `auto` does.

The idea is vLLM's (`chat_template_content_format`): a template that loops over a content takes lists of parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from jinja2 import nodes

_LISTS = frozenset(("selectattr", "rejectattr", "select", "reject", "list"))
"""Filters that leave a list of parts one."""
_OF_PARTS = frozenset(("text", "type"))


class ContentForm(Enum):
    TEXT = "text"
    PARTS = "parts"  # nothing in the template looks for a text
    EITHER = "either"


def content_form(template: nodes.Template) -> ContentForm:
    """TEXT unless the template loops over a content, or takes a part out of it by its position."""
    names = _names_of_content(template)
    loops = any(_is_content(_without_filters(loop.iter), names) for loop in template.find_all(nodes.For))
    if not loops and not any(_is_field_of_part(node, names) for node in _fields(template)):
        return ContentForm.TEXT
    asks = any(test.name == "string" and _is_content(test.node, names) for test in template.find_all(nodes.Test))
    return ContentForm.EITHER if asks else ContentForm.PARTS


def _names_of_content(template: nodes.Template) -> frozenset[str]:
    """Variables that a content is assigned to, and parameters of macros that are called with one."""
    names: frozenset[str] = frozenset()
    while (found := names | {*_assigned(template, names), *_passed(template, names)}) != names:
        names = found
    return names


def _assigned(template: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    for one in template.find_all(nodes.Assign):
        if _is_content(one.node, names) and isinstance(one.target, nodes.Name):
            yield one.target.name


def _passed(template: nodes.Template, names: frozenset[str]) -> Iterator[str]:
    macros = {macro.name: [argument.name for argument in macro.args] for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        parameters = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        yield from (name for name, value in zip(parameters, call.args, strict=False) if _is_content(value, names))
        yield from (one.key for one in call.kwargs if one.key in parameters and _is_content(one.value, names))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Or() | nodes.And():
            return _is_content(node.left, names) or _is_content(node.right, names)
    return False


def _without_filters(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter) and node.name in _LISTS:
        node = node.node
    return node


def _fields(template: nodes.Template) -> Iterator[tuple[nodes.Node, object]]:
    """(what, the field of it that is read)."""
    yield from ((node.node, node.attr) for node in template.find_all(nodes.Getattr))
    for item in template.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const):
            yield item.node, item.arg.value


def _is_field_of_part(field: tuple[nodes.Node, object], names: frozenset[str]) -> bool:
    """`content[0].text`; a text's first character has no fields."""
    part, name = field
    if name not in _OF_PARTS or not isinstance(part, nodes.Getitem) or not isinstance(part.arg, nodes.Const):
        return False
    return type(part.arg.value) is int and _is_content(part.node, names)
