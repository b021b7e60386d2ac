"""What every sampler that provides "grammar" must do, as a part of its contract (`core.testing.sampler`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from core.batch import SampledRow
from core.errors import NO_TOKEN_LEFT
from core.request import GrammarSpec, SamplingParams
from core.stages.grammar import NoGrammar
from core.stages.logits_processor import LogitsChain, NoProcessors
from core.stages.sampler import Sampler, SamplerContext
from core.testing.contract import Contract
from core.testing.sampler_reference import spec_of
from core.testing.sampler_rows import EOS, UNUSABLE, VOCAB, make_logits, make_row, metadata_of


class Allows(NoGrammar):
    """Grammars that allow some requests these ids, force `forced` behind them, and cannot go on for `broken`."""

    def __init__(self, allowed: Mapping[str, Sequence[int]], forced: tuple[int, ...] = (), broken: str = ""):
        self._allowed = allowed
        self._forced = forced
        self._broken = broken

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return [index for index, row in enumerate(rows) if row.request_id in self._allowed]

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        for index in self.touches(rows):
            barred = torch.ones(logits.shape[1], dtype=torch.bool)
            barred[list(self._allowed[rows[index].request_id])] = False
            logits[index, barred.to(logits.device)] = float("-inf")
        return {index: "the grammar broke" for index, row in enumerate(rows) if row.request_id == self._broken}

    def following(self, row: SampledRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*token_ids, *self._forced)


class KeepsBest(NoProcessors):
    """A chain that leaves every row the likeliest id that it finds there, and raises another one above it."""

    def __init__(self, raised: int):
        self._raised = raised

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return range(len(rows))

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        best = logits.argmax(-1, keepdim=True)
        kept = logits.gather(-1, best)
        logits.fill_(float("-inf")).scatter_(-1, best, kept)
        logits[:, self._raised] = 1000.0


class SamplerGrammarChecks(Contract):
    def _with_grammar(self, grammar: Allows, processors: LogitsChain | None = None) -> Sampler:
        self.needs("grammar")
        context = SamplerContext(
            spec_of(VOCAB, EOS, UNUSABLE), processors=processors or NoProcessors(), grammar=grammar
        )
        sampler: Sampler = self.make(context)
        return sampler

    def test_a_grammar_says_what_may_come_and_what_must_follow(self) -> None:
        """Ids that are never sampled stay so, whatever a grammar allows; rows beside it are as without it (G7, G8)."""
        sampler = self._with_grammar(Allows({"a": [40, 41, *UNUSABLE], "c": [42, 299]}, forced=(5, 6)))
        grammar = GrammarSpec(kind="choice", backend="allows")
        logits = make_logits(4, seed=6)
        logits[:, sorted(UNUSABLE)] = 50.0
        random = (
            SamplingParams(grammar=grammar)
            if "temperature" in self.provides
            else SamplingParams(temperature=0.0, grammar=grammar)
        )
        rows = [make_row("a", random), make_row("b"), make_row("c", random, choice=1), make_row("d")]
        found = sampler.sample(logits.clone(), metadata_of(rows)).token_ids
        plain = logits[:, :298].argmax(-1).tolist()
        assert found["a"][0] in (40, 41) and found["c"][0] == 42
        assert found["a"][1:] == found["c"][1:] == (5, 6)
        assert (found["b"], found["d"]) == ((plain[1],), (plain[3],))

    def test_a_grammar_that_cannot_go_on_fails_its_request_alone(self) -> None:
        sampler = self._with_grammar(Allows({"told": [1], "empty": [], "spoilt": [3], "good": [4]}, broken="told"))
        params = SamplingParams(temperature=0.0, grammar=GrammarSpec(kind="choice", backend="allows"))
        logits = make_logits(4)
        logits[2, 9] = float("nan")  # the model's fault, which a mask would hide
        rows = [make_row(name, params) for name in ("told", "empty", "spoilt", "good")]
        found = sampler.sample(logits, metadata_of(rows))
        assert dict(found.token_ids) == {"good": (4,)}
        assert found.errors.keys() == {"told", "empty", "spoilt"}
        assert "the grammar broke" in found.errors["told"]
        assert "NaN" in found.errors["spoilt"]

    def test_processors_choose_among_what_a_grammar_allows(self) -> None:
        """They find nothing else there, and what they raise besides stays barred."""
        self.needs("logits_processors")
        sampler = self._with_grammar(Allows({"a": [40, 41], "c": [42, 43]}), KeepsBest(raised=50))
        params = SamplingParams(temperature=0.0, grammar=GrammarSpec(kind="choice", backend="allows"))
        logits = make_logits(3)
        rows = [make_row("a", params), make_row("b"), make_row("c", params, choice=1)]
        best = {name: int(logits[index, ids].argmax()) for name, index, ids in (("a", 0, [40, 41]), ("c", 2, [42, 43]))}
        found = sampler.sample(logits, metadata_of(rows))
        assert not found.errors
        assert dict(found.token_ids) == {"a": (40 + best["a"],), "b": (50,), "c": (42 + best["c"],)}

    def test_masks_that_leave_a_grammar_nothing_are_an_error_of_the_request(self) -> None:
        self.needs("allowed_token_ids")
        sampler = self._with_grammar(Allows({"a": [40, 41], "b": [40, 41]}))
        grammar = GrammarSpec(kind="choice", backend="allows")
        asked = {"a": (41, 50), "b": (50, 51)}
        rows = [
            make_row(name, SamplingParams(temperature=0.0, grammar=grammar, allowed_token_ids=ids))
            for name, ids in asked.items()
        ]
        found = sampler.sample(make_logits(2), metadata_of(rows))
        assert dict(found.token_ids) == {"a": (41,)} and found.errors.keys() == {"b"}
        assert found.errors["b"].startswith(NO_TOKEN_LEFT), "nobody's fault but the request's"
