"""Stage 3, admission: bounds, queue caps, deadlines, tenant limits; makes the typed request (R3.1, R1.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.request import EngineRequest, SamplingParams
from core.stages.frontend import GenerateRequest, Load

if TYPE_CHECKING:
    from core.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    model: ModelSpec
    clock: Callable[[], float]  # monotonic seconds
    num_kv_slots: Callable[[], int]  # tokens that the whole KV pool holds; 0 while unknown


class Admission(Protocol):
    """Config group `admission`. Called once per request, in the event loop of the front process: must not block."""

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        """One EngineRequest per choice (`request_id` of choice i is f"{request.request_id}#{i}").

        Raises RequestError (context length, max_tokens …; names field and numbers) or OverloadedError (Retry-After).
        """
        ...
