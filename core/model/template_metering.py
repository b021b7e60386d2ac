"""Changes to the code that Jinja2 generates from a chat template, so that all of its work passes through a budget.

The environment that compiles it offers `turn()`, `joined(*parts)`, `checked(value)` and `emit_text(text)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is a plain scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Metered(NodeTransformer):
    """Puts the budget's calls into a parsed template, where Jinja2 has no hook of its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _statement("turn"))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _statement("turn"))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _computed(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(
            isinstance(part, nodes.Const) for part in node.iter_child_nodes()
        ):
            return node
        return _call("checked", [node], node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._computed(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._computed(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._computed(node)


def _call(name: str, args: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=line)


def _statement(name: str) -> nodes.ExprStmt:
    return nodes.ExprStmt(_call(name, [], 1), lineno=1)


class MeteredGenerator(CodeGenerator):
    """Plain text of a template is counted when it is written, like the value of an expression."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.emit_text({super()._output_const_repr(group)})"
