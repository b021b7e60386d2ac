"""What a request may ask of scheduler, sampler and logits processors: nothing is silently ignored. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, ValidationError

from core.components import Provided, closed_model, import_target
from core.errors import RequestError, near_matches, printable
from core.isolation.faults import ComponentName
from core.outputs import PluginIncident
from core.pipeline import PipelineDescription
from core.request import GRAMMAR_KINDS, GrammarSpec, SamplingParams
from core.stages.grammar import GROUP as GRAMMARS
from core.stages.logits_processor import GROUP, asks_for, parsed_params
from core.stages.sampler import unsupported_fields

if TYPE_CHECKING:
    from core.plugins import Plugins

MAX_PARAMS_BYTES = 1 << 16  # of one request for one processor, as they are sent

RUNS_PROCESSORS = "logits_processors"
"""The word that a sampler which runs `SamplerContext.processors` provides."""

PRIORITY = "priority"
"""The word of a scheduler that looks at it."""
BEFORE_PRIORITY = ("1.0", "1.1")
"""Plugin APIs that do not have the word."""


def params_class(provided: Provided) -> type[BaseModel] | None:
    """The pydantic model of a request's own parameters, where the component names one. Raises PluginError."""
    path = provided.component.params
    if path is None:
        return None
    return closed_model(provided, path, import_target(provided, path), "a request's parameters are one")


class RequestFields:
    """The check of one request at the edge, before it is rendered (`core.pipeline.FrontPipeline.request_fields`)."""

    def __init__(self, description: PipelineDescription, plugins: Plugins):
        self._scheduler = description.part("scheduler").provided
        self._schedulers = plugins.components("scheduler")
        self._sampler = description.part("sampler").provided
        self._samplers = plugins.components("sampler")
        self._installed = plugins.components(GROUP)
        self._selected = {part.provided.component.name: part.provided for part in description.chain(GROUP)}
        self._runs_processors = RUNS_PROCESSORS in self._sampler.component.provides
        self._grammars = plugins.components(GRAMMARS)
        self._selected_grammars = {part.provided.component.name: part.provided for part in description.chain(GRAMMARS)}
        self._params = {name: params_class(provided) for name, provided in self._selected.items()}

    def check_grammar(self, spec: GrammarSpec, param: str, backend_param: str) -> None:
        """Raises RequestError for `param`, the client's field, naming what would compile such a grammar and obey it; for
        `backend_param` where it is the backend that the client asks for."""
        if spec.kind not in GRAMMAR_KINDS:
            kind = _printable(spec.kind)
            message = f"{param}: {kind!r} is no kind of grammar{near_matches(kind, GRAMMAR_KINDS)}"
            raise RequestError(message, param=param)
        if "grammar" not in self._sampler.component.provides:
            options = [f"sampler={name}" for name in _able(self._samplers, "grammar")]
            raise _unsupported(param, self._sampler, options)
        able = _able(self._grammars, spec.kind)
        if spec.backend:
            self._check_backend(spec, backend_param, able)
        elif not any(spec.kind in provided.component.provides for provided in self._selected_grammars.values()):
            selected = f"grammars=[{','.join(self._selected_grammars)}]"
            raise _cannot(f"{param}: {selected} compiles no {spec.kind}", param, able)

    def _check_backend(self, spec: GrammarSpec, param: str, able: Sequence[str]) -> None:
        name, selected = _printable(spec.backend), self._selected_grammars
        installed = [provided.component.name for provided in self._grammars]
        running = [one for one, provided in selected.items() if spec.kind in provided.component.provides]
        if spec.backend not in installed:
            text = f"{param}: there is no grammar backend {name!r}{near_matches(name, installed)}"
            raise _cannot(text, param, (), running)
        if spec.backend not in selected:
            raise _cannot(f"{param}: this server does not run grammars={name}", param, [spec.backend], running)
        if spec.backend not in running:
            raise _cannot(f"{param}: grammars={name} compiles no {spec.kind}", param, () if running else able, running)

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError naming the field, and what would support it. `check_grammar` is apart."""
        supported = set(self._sampler.component.provides)
        if self._runs_processors:
            supported.update(*(provided.component.provides for provided in self._selected.values()))
        for field in unsupported_fields(params, {*supported, "grammar"}):
            raise self._unsupported(field)

    def check_priority(self, priority: int) -> None:
        """Raises RequestError naming the schedulers that would look at it."""
        if not priority or PRIORITY in self._scheduler.component.provides:
            return
        if self._scheduler.plugin.api in BEFORE_PRIORITY:
            return
        raise _unsupported(
            PRIORITY, self._scheduler, [f"scheduler={name}" for name in _able(self._schedulers, PRIORITY)]
        )

    def processor(self, name: str) -> ComponentName:
        """Whose parameters a request sends. Raises RequestError where no selected processor is called so."""
        if name not in self._selected:
            raise self._not_selected(name, f"{GROUP}.{_printable(name)}")
        provided = self._selected[name]
        return ComponentName(GROUP, name, provided.plugin.text, provided.component.target)

    def check_extra(self, name: str, values: object) -> None:
        """What a request sends for one processor. Raises RequestError, or whatever the stranger's class raises."""
        path = f"{GROUP}.{_printable(name)}"
        if name not in self._selected:
            raise self._not_selected(name, path)
        if not self._runs_processors:
            options = " or ".join(f"sampler={able}" for able in _able(self._samplers, RUNS_PROCESSORS))
            message = f"{path}: sampler={self._sampler.component.name} runs no logits processors; serve with {options}"
            raise RequestError(message, param=path, code="unsupported")
        model = self._params[name]
        if model is None:
            fields = self._selected[name].component.provides
            hint = f"; it is asked for by the field {' or '.join(fields)}" if fields else ""
            raise RequestError(f"{path}: {name} takes no parameters{hint}", param=path, code="unsupported")
        _check_values(model, values, path)

    def check_running(self, params: SamplingParams, incidents: Iterable[PluginIncident]) -> None:
        """Raises RequestError 503 for a request that asks for a processor which was switched off: another server may have it.

        What it said when it failed is for the operator (log, /health), not for clients.
        """
        for incident in incidents:
            provided = self._selected.get(incident.name) if incident.group == GROUP and incident.quarantined else None
            if provided is not None and asks_for(params, incident.name, provided.component.provides):
                raise RequestError(
                    f"{GROUP}={incident.name} was switched off after {incident.failures} failures; "
                    "requests that ask for it are refused until the next start",
                    param=_param_of(params, provided),
                    code="plugin_quarantined",
                    status=503,
                )

    def _unsupported(self, field: str) -> RequestError:
        samplers = _able(self._samplers, field)
        processors = _able(self._installed, field)
        options = [f"sampler={name}" for name in samplers]
        if self._runs_processors:
            options += [_adding(name) for name in processors]
        elif processors:
            adding = "" if self._selected.keys() & set(processors) else f" {_adding(processors[0])}"
            options += [f"sampler={name}{adding}" for name in _able(self._samplers, RUNS_PROCESSORS)]
        return _unsupported(field, self._sampler, options)

    def _not_selected(self, name: str, path: str) -> RequestError:
        installed = [provided.component.name for provided in self._installed]
        if name in installed:
            message = f"{path}: this server does not run it; serve with {_adding(name)}"
            return RequestError(message, param=path, code="unsupported")
        message = f"{path}: there is no such logits processor{near_matches(_printable(name), installed)}"
        return RequestError(message, param=path, code="unknown_field")


def _unsupported(field: str, by: Provided, options: Sequence[str]) -> RequestError:
    hint = f"; serve with {' or '.join(options)} for it" if options else ""
    message = f"{field} is not supported by {by.group}={by.component.name}{hint}"
    return RequestError(message, param=field, code="unsupported")


def _cannot(text: str, param: str, able: Sequence[str], running: Sequence[str] = ()) -> RequestError:
    """`able`: what to serve with. `running`: backends that take the grammar where the request names none."""
    hints = [f"leave the field out for {' or '.join(f'{GRAMMARS}={name}' for name in running)}"] if running else []
    hints += [f"serve with {' or '.join(f'+{GRAMMARS}=[{name}]' for name in able)} for it"] if able else []
    end = " or ".join(hints)
    if text.endswith("?"):
        end = end[:1].upper() + end[1:]
    separator = "" if not end else " " if text.endswith("?") else "; "
    return RequestError(f"{text}{separator}{end}", param=param, code="unsupported")


def _adding(name: str) -> str:
    """The override that adds `name` to what is selected."""
    return f"+{GROUP}=[{name}]"


def _able(components: Sequence[Provided], word: str) -> list[str]:
    return sorted(p.component.name for p in components if word in p.component.provides)


def _param_of(params: SamplingParams, provided: Provided) -> str:
    """The field by which a request asks for a processor."""
    name = provided.component.name
    if name in params.extra:
        return f"{GROUP}.{name}"
    return next(field for field in provided.component.provides if asks_for(params, "", (field,)))


def _check_values(model: type[BaseModel], values: object, path: str) -> None:
    if not isinstance(values, Mapping):
        raise RequestError(f"{path}: an object is expected", param=path, code="invalid_type")
    _check_can_be_sent(values, path)
    try:
        parsed_params(model, values)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        # A misspelt parameter often is the one that is missed.
        problem = next((found for found in problems if found["type"] == "extra_forbidden"), problems[0])
    else:
        return
    place = ".".join([path, *(_printable(str(step)) for step in problem["loc"])])
    if problem["type"] == "extra_forbidden":
        hint = near_matches(_printable(str(problem["loc"][-1])), model.model_fields)
        raise RequestError(f"{place}: there is no such parameter{hint}", param=place, code="unknown_field")
    code = "missing_field" if problem["type"] == "missing" else "invalid_value"
    raise RequestError(f"{place}: {printable(problem['msg'].removeprefix('Value error, '))}", param=place, code=code)


def _check_can_be_sent(values: Mapping[str, Any], path: str) -> None:
    """Parameters cross to the engine, once for each choice: whole numbers of 64 bits, text of Unicode, and not too many."""
    try:
        size = len(msgspec.msgpack.encode(dict(values)))
        json.dumps(values, allow_nan=False)  # as the params class reads them
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: {error}", param=path) from None
    if size > MAX_PARAMS_BYTES:
        message = f"{path}: the parameters have {size} bytes, and {MAX_PARAMS_BYTES} is the limit"
        raise RequestError(message, param=path, code="too_large")


def _printable(text: str) -> str:
    """A client's word for use in a message: short, no control characters."""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:64]
