"""How far one request's output has come in its grammar, and the masks of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from core.batch import SampledRow
from core.stages.grammar import GrammarError, Mask, Matcher, allow

MAX_FORCED = 512
"""Ids that a grammar may add to a request in one step."""


class GrammarProgress:
    """A matcher that follows the settled output of its request, wherever that was left.

    A step that failed is run again, and a verdict may keep fewer ids than were drawn: so nothing counts calls. The output as a
    row has it is the truth, and what was accepted beyond it is taken back.
    """

    def __init__(self, matcher: Matcher):
        self._matcher = matcher
        self._accepted: list[int] = []

    def fill(self, rows: Sequence[SampledRow], masks: Sequence[Mask]) -> None:
        """The masks of the rows of one step: after the output, and after each draft while these fit.

        A draft that does not fit is never drawn, so the rows behind it do not matter: there all is allowed. Where ids are forced,
        the first of them is all that is allowed: whether they come one by one or at once makes no difference.
        Raises GrammarError for an output that the grammar does not have.
        """
        self._catch_up(rows[0].output_token_ids)
        num_drafts = 0
        for row, mask in zip(rows, masks, strict=True):
            drafts = row.draft_token_ids[num_drafts:]
            taken = self._matcher.accept(drafts) if drafts else 0
            num_drafts += taken
            if num_drafts < len(row.draft_token_ids):
                mask.fill(-1)
            elif forced := self._matcher.forced():
                allow(mask, forced[:1])
            else:
                self._matcher.fill(mask)
        if num_drafts:
            self._matcher.rollback(num_drafts)

    def follow(self, output: Sequence[int], token_ids: Sequence[int], most: int) -> list[int]:
        """Go on with what was drawn after `output`; returns what the grammar forces after it, at most so many ids.

        Raises GrammarError for ids that do not fit.
        """
        self._catch_up(output)
        self._accept(token_ids)
        found: list[int] = []
        while len(found) < most and (forced := self._matcher.forced()[: most - len(found)]):
            self._accept(forced)
            found += forced
        return found

    def _catch_up(self, output: Sequence[int]) -> None:
        done, known = len(self._accepted), len(output)
        same = 0
        if done and done <= known and self._accepted[-1] == output[done - 1]:
            same = done  # nearly always: what was taken back is seen by the step that it is taken back for
        while same < min(done, known) and self._accepted[same] == output[same]:
            same += 1
        if same < done:
            self._matcher.rollback(done - same)
            del self._accepted[same:]
        self._accept(output[same:])

    def _accept(self, token_ids: Sequence[int]) -> None:
        count = self._matcher.accept(token_ids) if token_ids else 0
        self._accepted += token_ids[:count]
        if count < len(token_ids):
            raise GrammarError(f"token {token_ids[count]} at position {len(self._accepted)} does not fit the grammar")
