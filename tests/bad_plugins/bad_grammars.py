"""Grammar backends that each break one promise of `core.stages.grammar`."""

from __future__ import annotations

import json
import time

from pydantic import BaseModel, ConfigDict

from core.stages.grammar import GrammarError, allow

provides = ("choice",)


class Paths:
    def __init__(self, path, paths, eos_ids, vocabulary):
        self._path = path
        self.paths, self.eos_ids, self.vocabulary = paths, eos_ids, vocabulary

    def matcher(self):
        return self._path(self)


class Path:
    def __init__(self, grammar):
        self.grammar, self.taken = grammar, []

    def accept(self, token_ids):
        for count, token_id in enumerate(token_ids):
            if token_id not in self.following():
                return count
            self.taken.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens):
        del self.taken[len(self.taken) - num_tokens :]

    def fill(self, mask):
        allow(mask, self.following())

    def forced(self):
        following = self.following()
        ends = following == set(self.grammar.eos_ids)
        return (min(following),) if ends or len(following) == 1 else ()

    def following(self):
        done, taken = len(self.taken), self.taken
        found = {path[done] for path in self.grammar.paths if path[:done] == taken and path[done:]}
        return found.union(self.grammar.eos_ids if taken in self.grammar.paths else ())


class Choices:
    """Does it right: texts in the tokens of their encoding."""

    path = Path

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        self._load_vocabulary = context.load_vocabulary

    def compile(self, spec):
        vocabulary = self._load_vocabulary()
        paths = [vocabulary.encode(text) for text in json.loads(spec.source)]
        if not paths:
            raise GrammarError("there is nothing to choose from")
        return json.dumps([paths, sorted(vocabulary.eos_ids)]).encode()

    def load(self, artifact):
        return Paths(self.path, *json.loads(artifact), self._load_vocabulary())


class OneEndPath(Path):
    def following(self):
        return super().following() - {max(self.grammar.eos_ids)}


class OneEnd(Choices):
    """Knows one id of the end, where the model has two."""

    caught_by = "test_the_ends_are_allowed_where_a_text_may_end"
    path = OneEndPath


class EndsEarlyPath(Path):
    def following(self):
        ended = self.taken[-1:] and self.taken[-1] in self.grammar.eos_ids
        return super().following() | (set() if ended else set(self.grammar.eos_ids))


class EndsEarly(Choices):
    """May end anywhere."""

    caught_by = "test_other_texts_never_end"
    path = EndsEarlyPath


class NeverEndsPath(Path):
    def following(self):
        return super().following() - set(self.grammar.eos_ids)


class NeverEnds(Choices):
    """The last token is the last thing it allows."""

    caught_by = "test_texts_of_a_grammar_fit_token_by_token_and_may_end"
    path = NeverEndsPath


class AddsToTheMaskPath(Path):
    def fill(self, mask):
        own = mask.copy()
        allow(own, self.following())
        mask |= own


class AddsToTheMask(Choices):
    """Sets bits, and clears none."""

    caught_by = "test_masks_lead_to_every_text"
    path = AddsToTheMaskPath


class AllowsPaddingPath(Path):
    def fill(self, mask):
        following = self.following()
        width = self.grammar.vocabulary.vocab_size
        padding = range(len(self.grammar.vocabulary.tokens), width) if set(self.grammar.eos_ids) <= following else ()
        allow(mask, following.union(padding))


class AllowsPadding(Choices):
    """Where the text may end, rows without a token are all the same to it."""

    caught_by = "test_masks_are_as_wide_as_the_logits_and_texts_have_no_special_tokens"
    path = AllowsPaddingPath


class RaisesPath(Path):
    def accept(self, token_ids):
        _ = [self.grammar.vocabulary.tokens[token_id] for token_id in token_ids]
        return super().accept(token_ids)


class Raises(Choices):
    """Looks an id up that is none."""

    caught_by = "test_odd_ids_do_not_fit_and_nothing_is_raised"
    path = RaisesPath


class ForgetsPath(Path):
    def rollback(self, num_tokens):
        if num_tokens:
            self.taken.clear()


class Forgets(Choices):
    """Rolls back to the start, whatever is asked."""

    caught_by = "test_rolled_back_and_done_again_is_the_same"
    path = ForgetsPath


class ForcesTheFirstPath(Path):
    def forced(self):
        return tuple(sorted(self.following())[:1])


class ForcesTheFirst(Choices):
    """Where there is a choice, it makes it."""

    caught_by = "test_forced_ids_are_allowed_one_by_one_and_only_told"
    path = ForcesTheFirstPath


class MovesPath(Path):
    def forced(self):
        found = super().forced()
        self.accept(found)
        return found


class Moves(Choices):
    """Forced ids are taken at once."""

    caught_by = "test_forced_ids_are_allowed_one_by_one_and_only_told"
    path = MovesPath


class NeverForcedEndPath(Path):
    def forced(self):
        return tuple(one for one in super().forced() if one not in self.grammar.eos_ids)


class NeverForcedEnd(Choices):
    """Leaves the end to the model, also where there is nothing else."""

    caught_by = "test_where_a_text_can_only_end_one_id_of_the_end_is_forced"
    path = NeverForcedEndPath


class TakesWhatTheMaskHidesPath(Path):
    def fill(self, mask):
        following = self.following()
        allow(mask, following if following >= set(self.grammar.eos_ids) else sorted(following)[:1])


class TakesWhatTheMaskHides(Choices):
    """Allows the smallest id alone: not all texts can be written."""

    caught_by = "test_masks_lead_to_every_text"
    path = TakesWhatTheMaskHidesPath


class Shared(Choices):
    """One matcher for all."""

    caught_by = "test_matchers_of_a_grammar_do_not_mix"

    def load(self, artifact):
        grammar = super().load(artifact)
        one = grammar.matcher()
        grammar.matcher = lambda: one
        return grammar


class Remembers(Choices):
    """What it compiled is in the process that compiled it."""

    caught_by = "test_an_artifact_is_all_that_is_needed"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._known = {}

    def compile(self, spec):
        made = super().compile(spec)
        key = str(len(self._known)).encode()
        self._known[key] = made
        return key

    def load(self, artifact):
        return super().load(self._known[artifact])


class ReturnsText(Choices):
    """A text, which does not cross to the engine."""

    caught_by = "test_what_compiles_is_bytes_that_load"

    def compile(self, spec):
        return super().compile(spec).decode()


class TakesNothing(Choices):
    """What has nothing to choose from is the empty text to it."""

    caught_by = "test_what_no_text_satisfies_is_refused"

    def compile(self, spec):
        vocabulary = self._load_vocabulary()
        paths = [vocabulary.encode(text) for text in json.loads(spec.source) or [""]]
        return json.dumps([paths, sorted(vocabulary.eos_ids)]).encode()


class LeadsAstrayPath(Path):
    def following(self):
        found = super().following()
        if not self.taken:
            found |= set(range(100, 140)) - self.grammar.vocabulary.special_ids
        return found


class LeadsAstray(Choices):
    """At the start it allows tokens after which nothing fits."""

    caught_by = "test_what_a_mask_allows_fits_and_is_no_dead_end"
    path = LeadsAstrayPath


class MixesPath(Path):
    def following(self):
        done, ends = len(self.taken), set(self.grammar.eos_ids)
        if ends.intersection(self.taken):
            return set()
        lengths = {len(path) for path in self.grammar.paths}
        return {path[done] for path in self.grammar.paths if path[done:]} | (ends if done in lengths else set())


class Mixes(Choices):
    """Looks at how far a text has come, and not at what is in it."""

    caught_by = "test_walks_through_masks_end_in_the_language"
    path = MixesPath


class AllOrNothingPath(Path):
    def accept(self, token_ids):
        fits = super().accept(token_ids)
        if fits == len(token_ids):
            return fits
        self.rollback(fits)
        return 0


class AllOrNothing(Choices):
    """Where not all ids fit, it takes none."""

    caught_by = "test_several_ids_at_once_are_the_same"
    path = AllOrNothingPath


class LoadsAnything(Choices):
    """Bytes that it did not make are a grammar without texts to it."""

    caught_by = "test_other_bytes_do_not_load"

    def load(self, artifact):
        try:
            return super().load(artifact)
        except ValueError:
            return Paths(self.path, [], [], self._load_vocabulary())


class OneAtATimePath(Path):
    def fill(self, mask):
        self.grammar.current = self.following()
        time.sleep(0.0002)  # another thread has its turn
        allow(mask, self.grammar.current)


class OneAtATime(Choices):
    """What a matcher works with is kept with the grammar, for all of them."""

    caught_by = "test_two_threads_may_use_two_matchers"
    path = OneAtATimePath


class TakesOneKind(Choices):
    """Says that it knows regular expressions, and refuses each."""

    caught_by = "test_it_takes_a_grammar_of_each_kind"
    provides = ("choice", "regex")

    def compile(self, spec):
        if spec.kind != "choice":
            raise GrammarError(f"{spec.kind} is not supported")
        return super().compile(spec)


class IgnoresKeyword(Choices):
    """Integers between bounds, whatever else the schema says of them."""

    caught_by = "test_a_schema_that_it_takes_holds_texts_to_each_keyword"
    provides = ("json_schema",)

    def compile(self, spec):
        try:
            schema = json.loads(spec.source)
            if schema["type"] != "integer":
                raise GrammarError("only integers are supported")
            texts = [str(number) for number in range(schema["minimum"], schema["maximum"] + 1)]
        except (ValueError, LookupError, TypeError) as error:
            raise GrammarError(f"only integers between bounds are supported: {error}") from error
        vocabulary = self._load_vocabulary()
        return json.dumps([[vocabulary.encode(text) for text in texts], sorted(vocabulary.eos_ids)]).encode()
