"""What every logits processor must do, as tests::

    class TestNoDigits(LogitsProcessorContract):
        component = NoDigits
        params = NoDigitsParams  # as in its Component
        asks = ({"after": 3},)  # what requests send; left out, the least that `params` takes

The suite plays scripted requests: their tokens are given, so what a processor writes into the logits of one position can be
compared between batches, with a run of its own, and with a run that was interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError

from core.batch import SampledRow
from core.isolation.faults import ComponentName
from core.logits.chain import ProcessorChain
from core.logits.rows import Member
from core.model.tokenizer import Tokenizer
from core.request import SamplingParams
from core.stages.logits_processor import GROUP, LogitsProcessor, LogitsProcessorContext, parsed_params
from core.testing.contract import Contract
from core.testing.params_examples import FIELD_EXAMPLES, least_values
from core.testing.sampler_reference import spec_of
from core.testing.tokenizers import byte_level_bpe

NAME = "processor"
VOCAB = 340  # logits are wider than the tokenizer's vocabulary
EOS = frozenset({2, 5})
NUM_STEPS = 12
NEVER = float("-inf")
REPETITIVE = (40, 41, 42, 43, 40, 41, 42, 60, 40, 41, 42, 43, 40, 41, 42, 60)


@dataclass(frozen=True, slots=True)
class Script:
    """A request whose output is decided beforehand. It has a row in the steps `first` to `first` + NUM_STEPS - 1."""

    request_id: str
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    first: int = 0

    def row(self, position: int, num_drafts: int = 0, drafts: Sequence[int] | None = None) -> SampledRow:
        """The row of `position`, whose newest `num_drafts` tokens are drafts: the script's own, or `drafts`."""
        settled = position - num_drafts
        return SampledRow(
            request_id=self.request_id,
            params=self.params,
            seed=1,
            choice=0,
            position=position,
            prompt_token_ids=list(self.prompt_token_ids),
            output_token_ids=self.output_token_ids[:settled],
            draft_token_ids=tuple(self.output_token_ids[settled:position] if drafts is None else drafts),
        )

    def logits(self, position: int) -> torch.Tensor:
        """[V], the same for a position in every run."""
        generator = torch.Generator().manual_seed(
            1000 * position + len(self.request_id) + 7 * sum(self.prompt_token_ids)
        )
        return torch.randn(VOCAB, generator=generator) * 3.0


@dataclass(slots=True)
class Player:
    """The framework's part, at its plainest: states by request, and the rows that concern the processor. It hands out the
    same memory again and again, as the framework does."""

    processor: LogitsProcessor
    params: type[BaseModel] | None
    states: dict[str, Any] = field(default_factory=dict)
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(64, VOCAB))

    def edit(self, rows: Sequence[SampledRow], logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`logits` of each row after the processor, as copies."""
        shown = [index for index, row in enumerate(rows) if self.state(row) is not None]
        edited = [values.clone() for values in logits]
        if shown:
            part = self.memory[: len(shown)]
            part.copy_(torch.stack([logits[index] for index in shown]))
            own = [rows[index] for index in shown]
            finished = self.processor.apply(part, own, [self.states[row.request_id] for row in own])
            for index, values in zip(shown, part.clone(), strict=True):
                edited[index] = values
            self._finish(own, finished)
        return edited

    def state(self, row: SampledRow) -> Any:
        if row.request_id not in self.states:
            values = row.params.extra.get(NAME)
            params = parsed_params(self.params, values) if self.params and values is not None else None
            self.states[row.request_id] = self.processor.state(row, params)
        return self.states[row.request_id]

    def _finish(self, rows: Sequence[SampledRow], finished: Sequence[int] | None) -> None:
        for index in finished or ():
            if not rows[index].draft_token_ids:
                self.states[rows[index].request_id] = None


class LogitsProcessorContract(Contract):
    params: ClassVar[type[BaseModel] | None] = None
    """The class that `Component.params` names."""
    asks: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Parameters of requests that make it act; requests also set the fields that it `provides`."""

    def make_processor(self) -> LogitsProcessor:
        torch.manual_seed(0)
        tokenizer = _tokenizer()
        context = LogitsProcessorContext(spec_of(VOCAB, EOS), "cpu", lambda: tokenizer)
        processor: LogitsProcessor = self.make(context)
        return processor

    def player(self) -> Player:
        return Player(self.make_processor(), self.params)

    def scripts(self) -> list[Script]:
        """Requests that ask, in several ways, among others that do not; they do not all begin at once."""
        plain = SamplingParams()
        asking = [*self._asking(), *self._asking()]
        numbers = random.Random(5)
        found = []
        for index, params in enumerate(
            [item for pair in zip(asking, [plain] * len(asking), strict=True) for item in pair]
        ):
            prompt = [numbers.randrange(6, 300) for _ in range(6 + index)]
            output = list(REPETITIVE) if index % 4 < 2 else [numbers.randrange(6, 300) for _ in REPETITIVE]
            found.append(Script(f"r{index}", params, [*prompt, *REPETITIVE[index % 3 :]], output, first=index % 3))
        return found

    def _asking(self) -> list[SamplingParams]:
        fields = {name: FIELD_EXAMPLES[name] for name in self.provides if name in FIELD_EXAMPLES}
        if self.params is None:
            return [SamplingParams(**fields)]
        values = self.asks or [least_values(self.params)]
        return [SamplingParams(**fields, extra={NAME: dict(value)}) for value in values]

    def alone(self, script: Script) -> list[torch.Tensor]:
        """What the logits of each position become where nothing else runs."""
        player = self.player()
        positions = range(NUM_STEPS)
        return [player.edit([script.row(at)], [script.logits(at)])[0] for at in positions]

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        """Requests come and go, and stand in another order in each step."""
        scripts, player, numbers = self.scripts(), self.player(), random.Random(1)
        wanted = {script.request_id: self.alone(script) for script in scripts}
        for step in range(NUM_STEPS + 2):
            running = [script for script in scripts if 0 <= step - script.first < NUM_STEPS]
            numbers.shuffle(running)
            positions = [step - script.first for script in running]
            rows = [script.row(at) for script, at in zip(running, positions, strict=True)]
            edited = player.edit(rows, [script.logits(at) for script, at in zip(running, positions, strict=True)])
            for script, at, values in zip(running, positions, edited, strict=True):
                same = _equal(values, wanted[script.request_id][at])
                assert same, f"row {at} of {script.request_id} is edited otherwise beside other requests"

    def test_a_position_may_come_twice(self) -> None:
        for script in self.scripts():
            player, wanted = self.player(), self.alone(script)
            for at in range(NUM_STEPS):
                for time in ("first", "second"):
                    (values,) = player.edit([script.row(at)], [script.logits(at)])
                    assert _equal(values, wanted[at]), (
                        f"position {at} differs the {time} time; a state must not count calls"
                    )

    def test_a_state_made_later_is_the_same(self) -> None:
        """After a preemption the state is made anew, of the history so far."""
        for script in self.scripts():
            wanted = self.alone(script)
            for at in range(0, NUM_STEPS, 3):
                player = self.player()
                for later in range(at, NUM_STEPS):
                    (values,) = player.edit([script.row(later)], [script.logits(later)])
                    assert _equal(values, wanted[later]), f"position {later} differs where the state was made at {at}"

    def test_rows_of_drafts_are_as_if_settled(self) -> None:
        """Three drafts at a time; the rows of one request come in one call."""
        scripts, player = self.scripts(), self.player()
        wanted = {script.request_id: self.alone(script) for script in scripts}
        for start in range(0, NUM_STEPS - 3, 2):  # the last of the drafts are tried again
            rows = [script.row(start + count, count) for script in scripts for count in range(4)]
            logits = [script.logits(start + count) for script in scripts for count in range(4)]
            for row, values in zip(rows, player.edit(rows, logits), strict=True):
                same = _equal(values, wanted[row.request_id][row.position])
                assert same, (
                    f"position {row.position} of {row.request_id} differs behind {len(row.draft_token_ids)} drafts"
                )

    def test_rejected_drafts_leave_no_trace(self) -> None:
        for script in self.scripts():
            player, wanted = self.player(), self.alone(script)
            for at in range(NUM_STEPS):
                wrong = [(script.output_token_ids[at] + 1) % 300, 61, 62]
                rows = [script.row(at), *(script.row(at + n, n, wrong[:n]) for n in range(1, 4))]
                values = player.edit(rows, [script.logits(row.position) for row in rows])[0]
                assert _equal(values, wanted[at]), f"position {at} differs after drafts that were rejected"

    @pytest.mark.parametrize("kind", ["usual", "large", "equal", "masked"])
    def test_finite_logits_stay_drawable(self, kind: str) -> None:
        for script in self.scripts():
            player = self.player()
            for at in range(NUM_STEPS):
                (values,) = player.edit([script.row(at)], [_logits_of_kind(kind, script.logits(at))])
                assert not torch.isnan(values).any(), f"NaN at position {at}"
                assert bool(torch.isfinite(values.max())), f"nothing to draw at position {at}: {values.max()}"

    def test_it_edits_in_place_and_its_rows_only(self) -> None:
        script, player = self.scripts()[0], self.player()
        if player.state(script.row(0)) is None:
            pytest.skip("no request of the suite concerns it; give `asks`")
        matrix = torch.stack([script.logits(at) for at in range(9)])
        before, part, state = matrix.clone(), matrix[3:5], player.states[script.request_id]
        where = part.data_ptr(), tuple(part.shape), part.dtype, part.stride()
        returned: Any = player.processor.apply(part, [script.row(0), script.row(1, 1)], [state, state])
        found = part.data_ptr(), tuple(part.shape), part.dtype, part.stride()
        assert found == where, "the logits have another shape, type or storage; they are edited in place"
        assert returned is None or not isinstance(returned, torch.Tensor), "logits are edited in place, not returned"
        assert _is_indices(returned, 2), f"it returns row indices or None, not {returned!r}"
        assert torch.equal(matrix[:3], before[:3]) and torch.equal(matrix[5:], before[5:]), "other rows were edited"

    def test_what_it_has_finished_stays_as_it_is(self) -> None:
        for script in self.scripts():
            player, finished = self.player(), False
            for at in range(len(script.output_token_ids)):
                row, logits = script.row(at), script.logits(at)
                if player.state(row) is None:
                    break
                values = logits.clone().unsqueeze(0)
                finished = bool(player.processor.apply(values, [row], [player.states[row.request_id]])) or finished
                assert not finished or torch.equal(values[0], logits), (
                    f"position {at} is edited, though it was finished"
                )

    def test_rows_are_only_read(self) -> None:
        for script in self.scripts():
            player, rows = self.player(), [script.row(4), script.row(5, 1), script.row(6, 2)]
            before = [_contents(row) for row in rows]
            player.edit(rows, [script.logits(row.position) for row in rows])
            assert [_contents(row) for row in rows] == before, "it changed a request's tokens or parameters"

    def test_nothing_random_that_is_not_the_rows_own(self) -> None:
        scripts = self.scripts()
        rows, logits = [s.row(5) for s in scripts], [s.logits(5) for s in scripts]
        found = []
        for seed in (1, 2):
            player = self.player()
            _seed_everything(seed)
            before = _random_states()
            found.append(player.edit(rows, logits))
            assert _random_states() == before, "it draws from a generator that all share"
        assert all(_equal(one, other) for one, other in zip(*found, strict=True)), "two runs differ"

    def test_short_histories_and_ids_in_flight(self) -> None:
        """A prompt of one token; and a row whose newest ids are not known yet."""
        for params in [SamplingParams(), *self._asking()]:
            script = Script("short", params, [7], list(REPETITIVE))
            in_flight = SampledRow("flight", params, 1, 0, 6, [7, 8], list(REPETITIVE[:4]))
            rows = [script.row(0), script.row(1), in_flight]
            for values in self.player().edit(rows, [script.logits(row.position) for row in rows]):
                assert bool(torch.isfinite(values.max())), "nothing to draw"

    def test_it_acts(self) -> None:
        for script in self.scripts():
            if any(not _equal(values, script.logits(at)) for at, values in enumerate(self.alone(script))):
                return
        pytest.skip("no request of the suite makes it edit anything; give `asks`")

    def test_parameters_are_frozen_and_refuse_unknown_keys(self) -> None:
        if self.params is None:
            pytest.skip("requests send it no parameters")
        values = self.asks[0] if self.asks else least_values(self.params)
        made = parsed_params(self.params, values)
        with pytest.raises(ValidationError):
            parsed_params(self.params, {**values, "no_such_key": 1})
        for name in type(made).model_fields:
            with pytest.raises(ValidationError):
                setattr(made, name, getattr(made, name))


def chain_of(
    processor: LogitsProcessor,
    name: str = NAME,
    params: type[BaseModel] | None = None,
    provides: tuple[str, ...] = (),
    quarantine_after: int = 3,
) -> ProcessorChain:
    """The framework's own chain with one processor."""
    member = Member(ComponentName(GROUP, name, "test, test 1.0"), processor, params, provides)
    return ProcessorChain([member], quarantine_after=quarantine_after)


@cache
def _tokenizer() -> Tokenizer:
    return byte_level_bpe()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise, NaN and the sign of zero included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _is_indices(returned: Any, count: int) -> bool:
    if returned is None:
        return True
    return isinstance(returned, Sequence) and all(type(i) is int and 0 <= i < count for i in returned)


def _logits_of_kind(kind: str, logits: torch.Tensor) -> torch.Tensor:
    if kind == "large":
        return logits * 1e4
    if kind == "equal":
        return torch.zeros_like(logits)
    if kind == "masked":  # as after `allowed_token_ids`, or padding of the vocabulary
        logits[250:] = NEVER
    return logits


def _contents(row: SampledRow) -> tuple[object, ...]:
    return row.request_id, repr(row.params), row.position, [*row.prompt_token_ids], [*row.output_token_ids]


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _random_states() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist()
