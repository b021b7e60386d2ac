"""Grammars where the sampler runs: masks of the right rows, ids that are forced, and what becomes of a backend that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import core.grammar.rows as rows_module
from core.grammar.cuts import Cut, apply_cuts, apply_masks
from core.grammar.progress import GrammarProgress
from core.grammar.rows import GrammarRows, Loaded
from core.isolation.faults import ComponentName
from core.request import SamplingParams
from core.stages.grammar import GROUP, GrammarError, mask_size
from core.testing.harness.token_paths import PathMatcher, TokenPaths, paths_spec
from core.testing.sampler import make_logits, make_row

ROOT = Path(__file__).parents[2]
V, EOS = 70, 7
PATHS = [[1, 2, 3, 4, EOS], [1, 2, 3, 5, 6, EOS], [1, 9, EOS], [69, EOS]]
PART = ComponentName(GROUP, "paths", "acme, acme-wheel 1.0")
WHO = "grammars=paths (plugin acme, acme-wheel 1.0)"


def grammar_rows(backend=None, **options):
    return GrammarRows({PART: backend or TokenPaths()}, V, **options)


def row(name, output=(), drafts=(), paths=PATHS, **params):
    spec = paths_spec(paths) if paths else None
    params = SamplingParams(grammar=spec, **{"max_tokens": 50, **params})
    position = len(output) + len(drafts)
    return make_row(name, params, output_token_ids=list(output), draft_token_ids=tuple(drafts), position=position)


def masks(progress, rows):
    made = np.full((len(rows), mask_size(V)), 7, np.int32)
    progress.fill(rows, list(made))
    return [allowed(mask) for mask in made]


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:V]).tolist()


def kept(logits):
    return [torch.isfinite(line).nonzero().flatten().tolist() for line in logits]


def test_a_mask_follows_the_settled_output():
    progress = GrammarProgress(PathMatcher(PATHS))
    assert masks(progress, [row("a")]) == [[1, 69]]
    assert masks(progress, [row("a", [1])]) == [[2, 9]]
    assert masks(progress, [row("a", [1])]) == [[2, 9]]  # the step is run again
    assert masks(progress, [row("a", [1, 2, 3])]) == [[4, 5]]
    assert masks(progress, [row("a", [1, 9])]) == [[EOS]]  # what came later was taken back


def test_forced_ids_are_allowed_alone_and_one_by_one():
    class Text(PathMatcher):
        def fill(self, mask):
            mask.fill(-1)  # other tokens would write the same text

    assert masks(GrammarProgress(Text(PATHS)), [row("a", [1, 2])]) == [[3]]


def test_each_draft_has_a_mask_and_is_taken_back():
    matcher = PathMatcher(PATHS)
    progress = GrammarProgress(matcher)
    rows = [row("a", [1]), row("a", [1], [2]), row("a", [1], [2, 3]), row("a", [1], [2, 3, 8])]
    assert masks(progress, rows) == [
        [2, 9],
        [3],
        [4, 5],
        list(range(V)),
    ]  # nobody draws after a draft that does not fit
    assert matcher.taken == [1]
    assert masks(progress, [row("a", [1, 9])]) == [[EOS]]


def test_what_follows_is_the_whole_forced_run():
    progress = GrammarProgress(PathMatcher(PATHS))
    assert progress.follow([], [1], 9) == []
    assert progress.follow([1], [2], 9) == [3]
    assert progress.follow([1, 2, 3], [5], 9) == [6, EOS]
    assert progress.follow([1, 2, 3], [5], 1) == [6]
    assert progress.follow([], [69], 0) == []


def test_an_output_that_does_not_fit_is_an_error_that_says_where():
    progress = GrammarProgress(PathMatcher(PATHS))
    with pytest.raises(GrammarError, match=r"token 4 at position 1 "):
        progress.follow([1], [4], 9)
    with pytest.raises(GrammarError, match=r"token 8 at position 0 "):
        masks(GrammarProgress(PathMatcher(PATHS)), [row("a", [8])])


@pytest.mark.parametrize("way", ["ids on the host", "bits on the device"])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.4, 0.97, 1.0])
def test_masks_bar_what_has_no_bit(way, share):
    rng = np.random.default_rng(0)
    bits = rng.random((2, 32 * mask_size(V))) < share  # those past the vocabulary mean nothing
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = make_logits(5, V)
    wanted = logits.clone()
    wanted[[1, 4]] = wanted[[1, 4]].masked_fill(~torch.from_numpy(bits[:, :V]), float("-inf"))
    if way == "bits on the device":
        apply_masks(logits, [1, 4], words)
    else:
        cuts = [Cut.of(mask, V) for mask in words]
        assert all(len(cut.token_ids) <= V // 2 for cut in cuts)
        apply_cuts(logits, [1, 4], cuts)
    assert torch.equal(logits, wanted)


def test_rows_without_a_grammar_are_left_alone():
    rows = [row("a", paths=None), row("b", [1]), row("c", paths=None), row("d")]
    logits = make_logits(4, V)
    before = logits.clone()
    grammar = grammar_rows()
    grammar.begin(rows)
    assert grammar.touches(rows) == [1, 3]
    assert grammar.apply(logits, rows) == {}
    assert torch.equal(logits[0], before[0]) and torch.equal(logits[2], before[2])
    assert kept(logits)[1::2] == [[2, 9], [1, 69]]


def test_begin_need_not_be_called():
    rows, logits = [row("a", [1, 2, 3])], make_logits(1, V)
    assert grammar_rows().apply(logits, rows) == {}
    assert kept(logits) == [[4, 5]]


def test_following_needs_a_mask_first_and_stops_at_max_tokens():
    grammar, rows = grammar_rows(), [row("a", [1, 2, 3], max_tokens=5)]
    assert grammar.following(rows[0], (5,)) == (5,)
    grammar.apply(make_logits(1, V), rows)
    assert grammar.following(rows[0], (5,)) == (5, 6)  # five in all


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 0}, {"min_tokens": 1}, {"allowed_token_ids": (1, 2, 3)}, {"bad_words_token_ids": ((5, 6),)}],
)
def test_one_by_one_where_it_is_asked_or_each_id_needs_logits(fields):
    """A mask of the request holds for ids that the grammar forces, too."""
    grammar, rows = grammar_rows(jump_forward=bool(fields)), [row("a", [1], **fields)]
    grammar.apply(make_logits(1, V), rows)
    assert grammar.following(rows[0], (2,)) == (2,)
    logits, later = make_logits(1, V), [row("a", [1, 2], **fields)]
    grammar.apply(logits, later)
    assert kept(logits) == [[3]]


def test_choices_of_one_grammar_share_it_and_no_state():
    backend = TokenPaths()
    grammar, rows = grammar_rows(backend), [row("a", [1]), row("b", [69])]
    logits = make_logits(2, V)
    grammar.apply(logits, rows)
    assert backend.num_loaded == 1 and kept(logits) == [[2, 9], [EOS]]


def test_a_forgotten_request_begins_anew():
    grammar, logits = grammar_rows(), make_logits(1, V)
    grammar.apply(logits.clone(), [row("a", [1, 2])])
    grammar.forget(["a", "nobody"])
    grammar.apply(logits, [row("a", [69], paths=[[69, 8, EOS], [69, EOS]])])
    assert kept(logits) == [[EOS, 8]]


class Broken(TokenPaths):
    """`fault` is called when a mask is made for a request whose output begins with 69."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def matcher(self):
        fault = self.fault

        class Matcher(PathMatcher):
            def fill(self, mask):
                if self.taken[:1] == [69]:
                    fault()
                super().fill(mask)

            def forced(self):
                return ()

        return Matcher(self.paths)


def test_who_fails_ends_its_request_alone_and_is_switched_off():
    grammar = grammar_rows(Broken(lambda: 1 / 0), quarantine_after=2)
    for number in (1, 2):
        rows, logits = [row("a", [1]), row(f"bad{number}", [69])], make_logits(2, V)
        errors = grammar.apply(logits, rows)
        assert errors == {1: f"{WHO}: ZeroDivisionError: division by zero"}
        assert kept(logits)[0] == [2, 9]
        (incident,) = grammar.incidents()
        assert (incident.name, incident.failures, incident.quarantined) == ("paths", number, number == 2)
    assert grammar.apply(make_logits(1, V), [row("new")]) == {0: f"{WHO}: switched off after 2 failures"}


def test_a_grammar_that_cannot_go_on_is_nobodys_failure():
    def stop():
        raise GrammarError("its limits\nare reached")

    grammar = grammar_rows(Broken(stop), quarantine_after=1)
    for number in range(3):
        assert grammar.apply(make_logits(1, V), [row(f"r{number}", [69])]) == {0: f"{WHO}: its limits are reached"}
    assert not grammar.incidents()


def test_clients_cannot_have_a_trusted_backend_switched_off():
    grammar = grammar_rows(Broken(lambda: 1 / 0), quarantine_after=1, trusted=[PART])
    for number in range(3):
        assert "ZeroDivisionError" in grammar.apply(make_logits(1, V), [row(f"r{number}", [69])])[0]
    assert [one.quarantined for one in grammar.incidents()] == [False] * 3
    logits = make_logits(1, V)
    assert grammar.apply(logits, [row("a", [1])]) == {} and kept(logits) == [[2, 9]]


def test_masks_that_take_ever_longer_end_their_request_alone(monkeypatch):
    monkeypatch.setattr(rows_module, "MASK_S", 0.02)
    monkeypatch.setattr(rows_module, "MASK_TOKEN_S", 0.0)

    def slow():
        ends = time.thread_time() + 0.03
        while time.thread_time() < ends:
            pass

    grammar, logits = grammar_rows(Broken(slow), quarantine_after=1), make_logits(2, V)
    (error,) = grammar.apply(logits, [row("slow", [69]), row("a", [1])]).values()
    assert error.startswith(f"{WHO}: its masks take too long: 0.0 s for 2 tokens")
    assert kept(logits)[1] == [2, 9] and not grammar.incidents()


def test_a_mask_that_never_comes_costs_its_request_and_no_other():
    stuck = threading.Event()
    grammar = grammar_rows(Broken(stuck.wait), block_timeout=0.2)
    try:
        logits = make_logits(12, V)
        errors = grammar.apply(logits, [row("bad", [69]), *(row(f"a{number}", [1]) for number in range(11))])
        assert errors == {0: f"{WHO}: no mask within 0.2 s"}
        assert kept(logits)[1:] == [[2, 9]] * 11
    finally:
        stuck.set()


def test_a_mask_that_comes_too_late_is_nobody_elses():
    stuck, woken = threading.Event(), threading.Event()

    class Late(Broken):
        def load(self, artifact):
            inner = super().load(artifact)
            make = inner.matcher

            def matcher():
                made = make()
                fill = made.fill

                def late(mask):
                    fill(mask)
                    if made.taken[:1] == [69]:
                        mask.fill(-1)
                        woken.set()

                made.fill = late
                return made

            inner.matcher = matcher
            return inner

    grammar = grammar_rows(Late(stuck.wait), block_timeout=0.1)
    assert grammar.apply(make_logits(1, V), [row("bad", [69])]) == {0: f"{WHO}: no mask within 0.1 s"}
    rows, logits = [row("b", [1])], make_logits(1, V)
    grammar.begin(rows)
    stuck.set()
    assert woken.wait(5)
    assert grammar.apply(logits, rows) == {} and kept(logits) == [[2, 9]]


def test_a_step_that_is_run_again_is_alone_in_its_matchers():
    inside, most, counting = [0], [0], threading.Lock()

    def slow():
        with counting:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        with counting:
            inside[0] -= 1

    grammar = grammar_rows(Broken(slow))
    for _ in range(3):  # each forward pass failed
        grammar.begin([row("a", [69])])
    logits = make_logits(1, V)
    assert grammar.apply(logits, [row("a", [69])]) == {} and kept(logits) == [[EOS]]
    assert most == [1]


def test_masks_may_be_applied_twice_in_a_step():
    grammar, rows = grammar_rows(), [row("a", [1]), row("b", [1, 2, 3])]
    logits = make_logits(2, V)
    for _ in range(2):
        assert grammar.apply(logits, rows) == {}
        assert kept(logits) == [[2, 9], [4, 5]]
        logits.fill_(1.0)


def test_the_process_ends_while_a_backend_is_stuck():
    script = """
import threading
from core.grammar.rows import GrammarRows
from core.isolation.faults import ComponentName
from core.request import SamplingParams
from core.testing.harness.token_paths import TokenPaths, paths_spec
from core.testing.sampler import make_logits, make_row

class Stuck(TokenPaths):
    def load(self, artifact):
        threading.Event().wait()

params = SamplingParams(grammar=paths_spec([[1, 7]]))
rows = GrammarRows({ComponentName("grammars", "paths", "acme"): Stuck()}, 70, block_timeout=0.1)
print(rows.apply(make_logits(1, 70), [make_row("a", params, output_token_ids=[])]))
rows.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "no mask within 0.1 s" in done.stdout, done.stderr


def test_a_grammar_that_cannot_be_loaded_is_tried_again_for_the_next_request():
    class Once(TokenPaths):
        def load(self, artifact):
            if not self.num_loaded:
                self.num_loaded = 1
                raise OSError("no")
            return super().load(artifact)

    grammar = grammar_rows(Once())
    assert grammar.apply(make_logits(1, V), [row("a")]) == {0: f"{WHO}: OSError: no"}
    logits = make_logits(1, V)
    assert grammar.apply(logits, [row("b")]) == {}
    assert kept(logits) == [[1, 69]]


def test_loaded_grammars_are_bounded_by_their_bytes():
    loaded, made = Loaded(max_bytes=10), []

    def get(artifact):
        from concurrent.futures import Future

        def load():
            made.append(artifact)
            future: Future[object] = Future()
            future.set_result(object())
            return future

        return loaded.get(("paths", artifact), load)

    first = get(b"12345")
    assert get(b"12345") is first
    get(b"123456")
    assert get(b"12345") is not first and made == [b"12345", b"123456", b"12345"]
    assert get(b"x" * 50) and get(b"x" * 50)  # larger than all of it: kept while nothing else comes
    assert made.count(b"x" * 50) == 1


def test_a_request_with_a_backend_that_is_not_here_is_an_error_of_its_own():
    rows = [row("a", [1]), make_row("b", SamplingParams(grammar=paths_spec(PATHS, "other")), output_token_ids=[])]
    logits = make_logits(2, V)
    errors = grammar_rows().apply(logits, rows)
    assert list(errors) == [1] and "grammars=other" in errors[1]
    assert kept(logits)[0] == [2, 9]
