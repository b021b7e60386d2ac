"""The built-in tool parsers keep the contract."""

from __future__ import annotations

from core.stages.tool_parser import NoTools
from core.testing.tool_parser import ToolParserContract


class TestNone(ToolParserContract):
    component = NoTools
