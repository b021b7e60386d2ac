"""`predictor: oracle`: output lengths that are known before, for experiments: how much better could a scheduler do?

Known by the simulator (`PredictorContext.output_len`), or from a file with a line per request:
`{"request_id": "r1", "output_len": 129}`. Of all others nothing is known but their bound.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from core.errors import ConfigError, shown
from core.request import Request
from core.stages.predictor import PredictorContext, num_tokens_left

log = logging.getLogger("nonet.engine")
NOTHING_KNOWN = (
    "predictor=oracle knows no output lengths: this is no simulation, and predictor.path is not set. max_tokens alone counts; "
    "set predictor.path to a file of them, or select predictor=learnt, which learns them from requests that have ended"
)


class Oracle:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        path: str | None = Field(
            default=None, description="JSON lines with request_id and output_len; null: what the experiment says"
        )

    def __init__(self, settings: Settings, context: PredictorContext):
        self._max_model_len = context.max_model_len
        self._told = context.output_len
        self._lengths = {} if settings.path is None else read_lengths(Path(settings.path))
        if settings.path is None and not context.is_told:
            log.warning(NOTHING_KNOWN)

    def remaining(self, request: Request) -> float:
        most = num_tokens_left(request, self._max_model_len)
        length = self._told(request.request_id)
        if length is None:
            length = self._lengths.get(request.request_id)
        if length is None:
            return float(most)
        return float(min(max(length - request.num_output_tokens, 1), most))  # it has not ended: one more comes

    def observe(self, request: Request) -> None:
        """Nothing is learnt."""


def read_lengths(path: Path) -> dict[str, int]:
    """By request id; of two lines with one id the last counts. Raises ConfigError naming the line that cannot be used."""
    lengths: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    request_id, length = _parsed(line, f"predictor.path={path}: line {number}")
                    lengths[request_id] = length
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"predictor.path={path} cannot be read: {error}; name a file of JSON lines") from error
    return lengths


def _parsed(line: str, where: str) -> tuple[str, int]:
    try:
        row = json.loads(line)
        request_id, length = row["request_id"], row["output_len"]
    except (ValueError, TypeError, KeyError, RecursionError):
        request_id, length = None, None
    if type(request_id) is not str or type(length) is not int or length < 0:
        raise ConfigError(
            f'{where} is {shown(line.strip())}; write {{"request_id": "r1", "output_len": 129}}, a text and a number of tokens'
        )
    return request_id, length
