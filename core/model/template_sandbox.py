"""Where chat templates run: Jinja2's immutable sandbox, with bounds on work and size.

The sandbox alone keeps a template away from Python; it bounds neither time nor memory. Here every loop turn, call,
filter, arithmetic operation and piece of output passes through a `Budget`. Invariant: a value made by a template is at
most `max_chars` large, counted with repeats (so nested lists cannot multiply), hence each single operation is short and
the clock, looked at between operations, stops the rest.

Method names, filters and globals are lists of what is allowed; all else is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from core.model.template_budget import Budget, TemplateLimitError
from core.model.template_metering import Generation, Metered, MeteredGenerator

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            "capitalize",
            "count",
            "endswith",
            "find",
            "index",
            "isalnum",
            "isalpha",
            "isdigit",
            "islower",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "swapcase",
            "title",
            "upper",
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}

_FILTERS = frozenset(
    {
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
        "wordcount",
    }
)

_MAX_INDENT = 16
_MAX_INT_BITS = 4096


class _Namespace(Namespace):
    """`namespace()`, without hidden names and with a short repr, so that namespaces in namespaces cannot multiply."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_hidden(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _refuse_hidden(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError("namespace attributes cannot start with an underscore")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's whitespace rules, `tojson`, `raise_exception` and `strftime_now`; loop controls; no loader."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = MeteredGenerator

    def __init__(self, budget: Budget, functions: dict[str, Callable[..., Any]]) -> None:
        # Output that needs the context is never folded at compile time, when there is no budget.
        finalize = pass_context(lambda context, value: self._finalized(value))
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=finalize,
            extensions=[Generation, loopcontrols],
        )
        self.budget = budget
        self.globals = {"namespace": _Namespace, "range": self._range, "dict": self._dict, **functions}
        available = self.filters | {"tojson": self._to_json}
        self.filters = {name: self._metered(name, available[name]) for name in sorted(_FILTERS)}
        self.checked = budget.checked

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(Metered().visit(source), name, filename, defer_init)

    def turn(self) -> None:
        self.budget.spend()

    def emit_text(self, text: str) -> str:
        self.budget.emit(len(text))
        return text

    def _finalized(self, value: Any) -> Any:
        self.budget.checked(value)
        text = str(value)
        self.budget.emit(len(text))
        return text

    def joined(self, *parts: Any) -> Any:
        """The `~` operator."""
        for part in parts:
            self.budget.checked(part)
        texts = [str(part) for part in parts]
        self.budget.allow(sum(map(len, texts)))
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value) or isinstance(obj, (int, float, bytes, type)):
            return False
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return allowed is None or attr in allowed

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` makes text of any width: it is not among the allowed methods, so nothing is wrapped."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed in a chat template")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            __self._before_method(__obj.__name__, owner, args)
        __self.budget.spend()
        return __self.budget.checked(super().call(__context, __obj, *args, **kwargs))

    def _before_method(self, name: str, text: str, args: tuple[Any, ...]) -> None:
        if name == "replace" and len(args) >= 2:
            self._allow_replace(text, *args[:2])
        elif name == "join" and args:
            self._allow_join(args[0], text)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = self.budget.size
        if operator == "*":
            self.budget.allow(_product_size(left, right, size))
        elif operator == "**":
            self.budget.allow(_power_size(left, right))
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("'%' on text is not allowed in a chat template; use '~'")
        elif operator == "+":
            self.budget.allow(size(left) + size(right))
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.budget.allow(len(numbers))
        return numbers

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self.budget.checked(value)
        if indent is None and separators is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        if not isinstance(indent, (int, type(None))) or (indent or 0) > _MAX_INDENT:
            raise TemplateLimitError(f"tojson: indent must be a number up to {_MAX_INDENT}")
        return self._json_in_pieces(value, ensure_ascii, indent, separators, sort_keys)

    def _json_in_pieces(self, value: Any, ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool) -> str:
        """Indentation and separators multiply the size, so count while it is written."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces: list[str] = []
        total = 0
        for piece in encoder.iterencode(value):
            total += len(piece)
            self.budget.allow(total) if total > self.budget.max_chars else self.budget.spend()
            pieces.append(piece)
        return "".join(pieces)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with sizes checked and lazy results collected. Some filters have a context before the value."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        bounds: dict[str, Callable[..., None]] = {
            "replace": self._allow_replace,
            "join": self._allow_join,
            "indent": self._allow_indent,
        }
        bound = bounds.get(name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.budget.checked(args[at])
            if bound is not None:
                bound(*args[at:], **kwargs)
            result = function(*args, **kwargs)
            return self.budget.checked(self._collected(result) if isinstance(result, Iterator) else result)

        return run

    def _collected(self, items: Iterator[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            found.append(item)
            self.budget.spend()
            if len(found) > self.budget.max_chars:
                self.budget.allow(len(found))
        return found

    # Operations whose result may be far larger than what goes in are refused by size beforehand. The parameters are
    # those of the filter or method.

    def _allow_replace(self, text: Any, old: Any, new: Any, count: Any = None) -> None:
        text, old, new = (str(self.budget.checked(part)) for part in (text, old, new))
        self.budget.allow(len(text) + text.count(old) * len(new))

    def _allow_join(self, parts: Any, d: Any = "", attribute: Any = None) -> None:
        self.budget.allow(self.budget.size(parts) + len(parts) * self.budget.size(d))

    def _allow_indent(self, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
        lines = str(self.budget.checked(text)).count("\n") + 1
        self.budget.allow(lines * (width if isinstance(width, int) else self.budget.size(width)))


def _product_size(left: Any, right: Any, size: Callable[[Any], int]) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _int_size(left.bit_length() + right.bit_length())
    count, value = (left, right) if isinstance(left, int) else (right, left)
    return size(value) * max(count, 0) if isinstance(count, int) else 1


def _power_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _int_size(left.bit_length() * abs(right))
    return 1


def _int_size(bits: int) -> int:
    if bits > _MAX_INT_BITS:
        raise TemplateLimitError(f"the chat template makes a number of more than {_MAX_INT_BITS} bits")
    return 1 + bits // 3
