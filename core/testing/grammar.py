"""What every grammar backend must do, as tests::

    class TestMine(GrammarContract):
        component = Mine
        provides = frozenset({"choice", "regex"})

For each kind that it provides there are grammars here, with texts of theirs and others; `examples` adds to them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest

from core.grammar.compilation import proved
from core.request import GRAMMAR_KINDS, GrammarSpec
from core.stages.grammar import GrammarBackend, GrammarContext, GrammarError, Matcher, Vocabulary
from core.testing.contract import Contract
from core.testing.grammar_examples import EXAMPLES, KEYWORDS, NO_TEXT, PADDING, GrammarExample, vocabularies
from core.testing.grammar_walks import Case, allowed, followed, led, segmented, walked

NUM_WALKS = 12


class GrammarContract(Contract):
    examples: ClassVar[Sequence[GrammarExample]] = ()
    """Of kinds that it provides; also where it means more by a kind than others do."""

    def backend(self, vocabulary: Vocabulary) -> GrammarBackend:
        made: GrammarBackend = self.make(GrammarContext(lambda: vocabulary))
        return made

    def cases(self) -> Iterator[Case]:
        """The examples that it takes: of a kind that it provides it need not take every grammar."""
        if not self.provides:
            pytest.skip("it provides no kind of grammar")
        for vocabulary in vocabularies():
            backend = self.backend(vocabulary)
            for example in (*EXAMPLES, *self.examples):
                artifact = taken(backend, vocabulary, example.spec) if example.spec.kind in self.provides else None
                assert artifact is not None or example not in self.examples, f"{example.spec} is refused"
                if artifact is not None:
                    yield Case(example, vocabulary, artifact, backend.load(artifact))

    def paths(self) -> Iterator[tuple[Case, list[int]]]:
        """Each text in the model's own tokens, with an id of the end."""
        for case in self.cases():
            for text in case.example.texts:
                yield case, [*case.vocabulary.encode(text), max(case.vocabulary.eos_ids)]

    def test_it_provides_kinds_of_grammars(self) -> None:
        assert self.provides and self.provides <= set(GRAMMAR_KINDS), f"provides is some of {GRAMMAR_KINDS}"

    def test_it_takes_a_grammar_of_each_kind(self) -> None:
        """One at least of those here; what it needs more, `examples` can have."""
        found = {case.example.spec.kind for case in self.cases()}
        assert found >= self.provides, f"it provides {sorted(self.provides - found)}, and takes none of them"

    def test_what_compiles_is_bytes_that_load(self) -> None:
        for case in self.cases():
            assert type(case.artifact) is bytes, f"{case.name} compiles to {type(case.artifact).__name__}, not bytes"

    def test_texts_of_a_grammar_fit_token_by_token_and_may_end(self) -> None:
        for case, ids in self.paths():
            matcher = case.grammar.matcher()
            for at, token_id in enumerate(ids):
                assert matcher.accept([token_id]) == 1, (
                    f"{case.name}: after {case.show(ids[:at])} {token_id} does not fit"
                )

    def test_several_ids_at_once_are_the_same(self) -> None:
        for case, ids in self.paths():
            matcher, wrong = case.grammar.matcher(), [*ids, ids[0], ids[0]]
            assert matcher.accept([]) == 0
            assert matcher.accept(wrong) == len(ids), f"{case.name}: {case.show(ids)} fits, and nothing after it"
            matcher.rollback(len(ids))
            assert matcher.accept(ids[:-1]) == len(ids) - 1

    def test_other_texts_never_end(self) -> None:
        """In any tokens."""
        rng = random.Random(1)
        for case in self.cases():
            for text in case.example.others:
                for ids in (case.vocabulary.encode(text), *(segmented(case.vocabulary, text, rng) for _ in range(3))):
                    done = case.grammar.matcher().accept([*ids, min(case.vocabulary.eos_ids)])
                    assert done <= len(ids), f"{case.name}: {case.show(ids)} is not in it, and ends"

    def test_a_schema_that_it_takes_holds_texts_to_each_keyword(self) -> None:
        """What it does not know is refused, never left out."""
        rng = random.Random(5)
        for vocabulary in vocabularies():
            backend = self.backend(vocabulary)
            for spec, text in keyword_specs(self.provides):
                artifact = taken(backend, vocabulary, spec)
                if artifact is not None:
                    matcher, ids = backend.load(artifact).matcher(), segmented(vocabulary, text, rng)
                    done = matcher.accept([*ids, min(vocabulary.eos_ids)])
                    assert done <= len(ids), f"{spec.source} does not have {text}, and it ends"

    def test_masks_lead_to_every_text(self) -> None:
        for case in self.cases():
            for text in case.example.texts:
                assert led(case, text.encode()), f"{case.name}: no tokens that masks allow write {text!r}"

    def test_walks_through_masks_end_in_the_language(self) -> None:
        for case in self.cases():
            for seed in range(NUM_WALKS):
                ids = walked(case, random.Random(seed))
                if ids is not None and case.example.holds is not None:
                    text = case.text(ids).decode("utf-8", "replace")
                    assert case.example.holds(text), f"{case.name}: {text!r} ends, and is not in it"

    def test_what_a_mask_allows_fits_and_is_no_dead_end(self) -> None:
        rng = random.Random(2)
        for case, ids in self.paths():
            matcher = case.grammar.matcher()
            for at, token_id in enumerate(ids):
                may = sorted(allowed(matcher, case.vocabulary) - case.vocabulary.eos_ids)
                for one in rng.sample(may, min(6, len(may))):
                    tried = f"{case.name}: after {case.show(ids[:at])} token {one} is allowed"
                    assert matcher.accept([one]) == 1, f"{tried}, and does not fit"
                    assert allowed(matcher, case.vocabulary), f"{tried}, and nothing may follow"
                    matcher.rollback(1)
                matcher.accept([token_id])

    def test_the_ends_are_allowed_where_a_text_may_end(self) -> None:
        for case, ids in self.paths():
            matcher, ends = case.grammar.matcher(), case.vocabulary.eos_ids
            for at, token_id in enumerate(ids):
                may = allowed(matcher, case.vocabulary) & ends
                where = f"{case.name}: after {case.show(ids[:at])}"
                assert may in (frozenset(), ends), f"{where} some ids of the end are allowed, and not all"
                for end in ends:
                    fits = matcher.accept([end])
                    assert fits == bool(may), (
                        f"{where} the end {end} is {'' if may else 'not '}allowed, and fits {fits}"
                    )
                    matcher.rollback(fits)
                if case.example.holds is not None and token_id not in ends:
                    text = case.text(ids[:at]).decode("utf-8", "replace")
                    assert bool(may) == case.example.holds(text), f"{where} it may end: {bool(may)}"
                matcher.accept([token_id])
            assert not allowed(matcher, case.vocabulary), f"{case.name}: something is allowed after the end"

    def test_masks_are_as_wide_as_the_logits_and_texts_have_no_special_tokens(self) -> None:
        for case, ids in self.paths():
            matcher, vocabulary = case.grammar.matcher(), case.vocabulary
            empty = {at for at in range(len(vocabulary.tokens)) if not vocabulary.tokens[at]}
            never = empty | (vocabulary.special_ids - vocabulary.eos_ids)
            for token_id in ids:
                may = allowed(matcher, vocabulary)
                assert max(may) < len(vocabulary.tokens), f"{case.name}: id {max(may)} is padding, and allowed"
                assert not may & never, f"{case.name}: {min(may & never, default=0)} is no part of a text, and allowed"
                matcher.accept([token_id])

    def test_odd_ids_do_not_fit_and_nothing_is_raised(self) -> None:
        for case, ids in self.paths():
            matcher, vocabulary = case.grammar.matcher(), case.vocabulary
            special = min(vocabulary.special_ids - vocabulary.eos_ids)
            for token_id in ids[:4]:
                before = allowed(matcher, vocabulary)
                for odd in (
                    -1,
                    special,
                    len(vocabulary.tokens),
                    len(vocabulary.tokens) + PADDING,
                    2**31,
                    2**40,
                    -(2**70),
                ):
                    assert matcher.accept([odd]) == 0, f"{case.name}: {odd} fits"
                assert allowed(matcher, vocabulary) == before, f"{case.name}: ids that do not fit change the mask"
                matcher.accept([token_id])

    def test_rolled_back_and_done_again_is_the_same(self) -> None:
        rng = random.Random(3)
        for case, ids in self.paths():
            matcher = case.grammar.matcher()
            masks = [allowed(matcher, case.vocabulary)]
            for token_id in ids:
                matcher.accept([token_id])
                masks.append(allowed(matcher, case.vocabulary))
            done = len(ids)
            for _ in range(8):
                back = rng.randint(0, done)
                matcher.rollback(back)
                done -= back
                where = f"{case.name}: {back} ids taken back to {case.show(ids[:done])}"
                assert allowed(matcher, case.vocabulary) == masks[done], f"{where}, and the mask is another"
                more = rng.randint(0, len(ids) - done)
                assert matcher.accept(ids[done : done + more]) == more, f"{where}, and {more} that did fit do not"
                done += more
                assert allowed(matcher, case.vocabulary) == masks[done], f"{where} and {more} done again: another mask"

    def test_matchers_of_a_grammar_do_not_mix(self) -> None:
        for case, ids in self.paths():
            one, first = case.grammar.matcher(), allowed(case.grammar.matcher(), case.vocabulary)
            for count in range(1, len(ids) + 1):
                one.accept(ids[count - 1 : count])
                other = case.grammar.matcher()
                assert allowed(other, case.vocabulary) == first, f"{case.name}: a new matcher is not at the start"
                other.accept(ids[:count])
                same = allowed(other, case.vocabulary) == allowed(one, case.vocabulary)
                assert same, f"{case.name}: two matchers differ after {case.show(ids[:count])}"

    def test_forced_ids_are_allowed_one_by_one_and_only_told(self) -> None:
        for case, ids in self.paths():
            matcher = case.grammar.matcher()
            for at, token_id in enumerate(ids):
                self._follow_forced(case, matcher, ids[:at])
                matcher.accept([token_id])
            assert matcher.forced() == (), f"{case.name}: something is forced after the end"

    def _follow_forced(self, case: Case, matcher: Matcher, before: Sequence[int]) -> None:
        where, forced = f"{case.name}: after {case.show(before)}", matcher.forced()
        assert type(forced) is tuple and all(type(one) is int for one in forced), (
            f"{where} {forced!r} is no tuple of ints"
        )
        assert matcher.forced() == forced, f"{where} forced() gives another answer the second time"
        for count, one in enumerate(forced):
            may = allowed(matcher, case.vocabulary)
            assert one in may, f"{where} {forced} are forced, and the mask does not allow number {count}"
            if one not in case.vocabulary.eos_ids:
                begins = case.text(forced[count:])
                odd = [i for i in may if not _agree(case.vocabulary.tokens[i], begins)]
                assert not odd, f"{where} {begins!r} is forced, and {case.show(odd[:3])} is allowed"
            else:
                assert may == case.vocabulary.eos_ids and len(forced) == count + 1, (
                    f"{where} the end is forced: {forced}"
                )
            assert matcher.accept([one]) == 1, f"{where} {forced} are forced, and number {count} does not fit"
        matcher.rollback(len(forced))

    def test_where_a_text_can_only_end_one_id_of_the_end_is_forced(self) -> None:
        for case, ids in self.paths():
            matcher = case.grammar.matcher()
            for token_id in ids:
                only = allowed(matcher, case.vocabulary) == case.vocabulary.eos_ids
                ends = case.vocabulary.eos_ids.intersection(matcher.forced()[:1])
                assert bool(ends) == only, (
                    f"{case.name}: it can{' only' if only else ''} end, and {matcher.forced()} is forced"
                )
                matcher.accept([token_id])

    def test_an_artifact_is_all_that_is_needed(self) -> None:
        """Compiled in one process, loaded in another."""
        for case, ids in self.paths():
            other = self.backend(case.vocabulary).load(case.artifact).matcher()
            matcher = case.grammar.matcher()
            for token_id in ids:
                same = allowed(other, case.vocabulary) == allowed(matcher, case.vocabulary)
                assert same, f"{case.name}: loaded twice, and the masks differ"
                other.accept([token_id])
                matcher.accept([token_id])

    def test_other_bytes_do_not_load(self) -> None:
        for vocabulary in vocabularies():
            for junk in (b"", b"\x00\xff\x80 no artifact", b"{"):
                with pytest.raises(Exception):  # noqa: B017  (which one is the backend's own affair)
                    self.backend(vocabulary).load(junk).matcher()

    def test_what_no_text_satisfies_is_refused(self) -> None:
        vocabulary = vocabularies()[0]
        backend = self.backend(vocabulary)
        for spec in NO_TEXT:
            if spec.kind in self.provides:
                with pytest.raises(GrammarError) as caught:
                    proved(backend, backend.compile(spec), vocabulary.vocab_size)
                reason = str(caught.value)
                assert reason and "\n" not in reason and len(reason) < 500, f"no reason in a line: {reason!r}"

    def test_two_threads_may_use_two_matchers(self) -> None:
        for case in self.cases():
            paths = [[*case.vocabulary.encode(text), min(case.vocabulary.eos_ids)] for text in case.example.texts] * 3
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(partial(followed, case), paths))
            for ids, masks in zip(paths, found, strict=True):
                assert masks == followed(case, ids), f"{case.name}: {case.show(ids)} in threads has other masks"


def taken(backend: GrammarBackend, vocabulary: Vocabulary, spec: GrammarSpec) -> bytes | None:
    """Compiled, and proved as where grammars are compiled; None where it is refused there."""
    try:
        return proved(backend, backend.compile(spec), vocabulary.vocab_size)
    except GrammarError:
        return None


def keyword_specs(kinds: Collection[str]) -> Iterator[tuple[GrammarSpec, str]]:
    """Grammars of these kinds, each with a text that is not in it."""
    for schema, texts in KEYWORDS:
        tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
        for text in texts:
            if "json_schema" in kinds:
                yield GrammarSpec(kind="json_schema", source=json.dumps(schema)), text
            if "structural_tag" in kinds:
                yield GrammarSpec(kind="structural_tag", source=json.dumps(tag)), f"<a>{text}</a>"


def _agree(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)
