"""The grammars of all requests where the sampler runs: which rows have one, their masks, and what becomes of one that fails."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from core.batch import SampledRow
from core.daemon_threads import DaemonThreads
from core.errors import Terminated, described, told
from core.grammar.cuts import Cut, apply_cuts, apply_masks
from core.grammar.prelude import BehindText, Prelude
from core.grammar.progress import MAX_FORCED, GrammarProgress
from core.isolation.faults import ComponentName, Tally, drained
from core.outputs import PluginIncident
from core.request import GrammarSpec, SamplingParams
from core.stages.grammar import CompiledGrammar, GrammarBackend, GrammarError, Mask, Matcher, Vocabulary, mask_size

if TYPE_CHECKING:
    import torch

log = logging.getLogger("nonet.grammars")

MASK_S = 1.0
MASK_TOKEN_S = 0.005
"""What the masks of a request may take of a core, in all and for each token. They take some 50 us; ambiguous grammars need more
for each token than for the one before."""
MAX_INCIDENTS = 64  # kept where nobody fetches them
MAX_LOADED_BYTES = 64 * 2**20  # of grammars that are kept
LOADED_BYTES = 256 * 2**10  # of one beside its artifact, which may be tiny: measured with llguidance as 60 to 620 KiB


@dataclass(slots=True, eq=False)
class Member:
    """One backend, and its failures."""

    part: ComponentName
    backend: GrammarBackend
    tally: Tally


@dataclass(slots=True, eq=False)
class Held:
    """A request's grammar. `progress` is None until its grammar is loaded."""

    spec: GrammarSpec
    member: Member | None  # None: nobody here knows its grammar
    grammar: Future[CompiledGrammar]
    preludes: Preludes
    progress: GrammarProgress | None = None
    mask_s: float = 0.0  # of a core, for its masks so far
    error: str = ""  # it cannot go on

    def spend(self, seconds: float, num_tokens: int) -> None:
        """Raises GrammarError."""
        self.mask_s += seconds
        if self.mask_s > MASK_S + MASK_TOKEN_S * num_tokens:
            raise GrammarError(f"its masks take too long: {self.mask_s:.1f} s for {num_tokens} tokens")


@dataclass(slots=True, eq=False)
class Share:
    """The rows of one request in a step."""

    held: Held
    cut_width: int  # vocabulary size where the logits are on the host; else 0, and masks go to their device
    indices: list[int] = field(default_factory=list)  # of the S rows, ascending
    rows: list[SampledRow] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    done: Future[None] | None = None


class GrammarRows:
    """See `core.stages.grammar.GrammarMask`.

    Masks are made in threads: what backends do there is native code that lets other threads run. A request whose mask takes
    longer than `block_timeout` seconds, or whose backend raises, ends with an error that names the backend; after
    `quarantine_after` such failures the backend is switched off until the next start. A grammar whose masks take more time than
    `MASK_S` and `MASK_TOKEN_S` allow ends its request alone: everybody's step waits for it. A thread that was given up may still
    write to its masks, and is in its matcher: nobody else gets either.
    """

    def __init__(
        self,
        backends: Mapping[ComponentName, GrammarBackend],
        vocab_size: int,
        jump_forward: bool = True,
        quarantine_after: int = 3,
        block_timeout: float = 5.0,
        *,
        trusted: Collection[ComponentName] = (),
        clock: Callable[[], float] = time.perf_counter,
        load_vocabulary: Callable[[], Vocabulary] | None = None,
        device: str = "cpu",
    ):
        """`trusted`: backends that are never switched off, whatever clients make them do. `load_vocabulary`: for grammars that
        begin behind other text (`GrammarSpec.after`). `device`: of the logits."""
        limits = {part: math.inf if part in trusted else quarantine_after for part in backends}
        self._members = {
            part.name: Member(part, backend, Tally(part, log, limits[part])) for part, backend in backends.items()
        }
        self._vocab_size = vocab_size
        self._on_host = device == "cpu"
        self._jump_forward = jump_forward
        self._block_timeout = block_timeout
        self._clock = clock
        self._held: dict[str, Held] = {}
        self._loaded = Loaded()
        self._preludes = Preludes(load_vocabulary)
        self._num_threads = min(8, max(1, (os.cpu_count() or 1) // 2))
        self._threads = self._new_threads()
        self._masks = self._new_masks(0)
        self._rows: Sequence[SampledRow] | None = None  # of the step that the rest is of
        self._touched: list[int] = []
        self._shares: dict[str, Share] = {}
        self._incidents: deque[PluginIncident] = deque(maxlen=MAX_INCIDENTS)

    def begin(self, rows: Sequence[SampledRow]) -> None:
        for share in self._shares.values():  # of a step whose forward pass failed: it is run again
            self._result(share)
        self._rows, self._touched, self._shares = rows, [], {}
        for index, row in enumerate(rows):
            if row.params.grammar is not None:
                self._touched.append(index)
                share = self._shares.get(row.request_id) or self._share(row, row.params.grammar)
                share.indices.append(index)
                share.rows.append(row)
        if not self._touched:
            return
        if len(self._masks) < len(self._touched):
            self._masks = self._new_masks(len(self._touched))
        masks = dict(zip(self._touched, self._masks, strict=False))
        for share in self._shares.values():
            share.masks = [masks[index] for index in share.indices]
            share.done = self._threads.submit(partial(_fill, share))

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        if self._rows is not rows:
            self.begin(rows)
        return self._touched

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        if not self.touches(rows):
            return {}
        errors = {
            index: error for share in self._shares.values() if (error := self._result(share)) for index in share.indices
        }
        shares = [share for share in self._shares.values() if share.indices[0] not in errors]
        indices = [index for share in shares for index in share.indices]
        if self._on_host:
            apply_cuts(logits, indices, [cut for share in shares for cut in share.cuts])
        elif indices:
            apply_masks(logits, indices, np.stack([mask for share in shares for mask in share.masks]))
        return errors

    def following(self, row: SampledRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        held = self._held.get(row.request_id)
        if not self._jump_forward or _needs_logits(row.params) or held is None or held.error:
            return token_ids
        if held.member is None or held.progress is None:
            return token_ids
        most = min(MAX_FORCED, row.params.max_tokens - len(row.output_token_ids) - len(token_ids))
        try:
            return (*token_ids, *held.progress.follow(row.output_token_ids, token_ids, most))
        except Terminated:
            raise
        except BaseException as error:  # told with the next mask: what was drawn is good
            held.error = self._failed(held.member, error)
            return token_ids

    def forget(self, request_ids: Sequence[str]) -> None:
        if self._held:
            for request_id in request_ids:
                self._held.pop(request_id, None)

    def incidents(self) -> Sequence[PluginIncident]:
        return drained(self._incidents)

    def close(self) -> None:
        self._threads.close()

    def _share(self, row: SampledRow, spec: GrammarSpec) -> Share:
        held = self._held.get(row.request_id)
        if held is None:
            held = self._held[row.request_id] = self._hold(spec)
        share = self._shares[row.request_id] = Share(held, self._vocab_size if self._on_host else 0)
        return share

    def _hold(self, spec: GrammarSpec) -> Held:
        member = self._members.get(spec.backend)
        if member is None:
            return Held(
                spec,
                None,
                Future(),
                self._preludes,
                error=f"grammars={spec.backend} is not selected where the sampler runs",
            )
        if member.tally.quarantined:
            error = f"{member.part.who}: switched off after {member.tally.failures} failures"
            return Held(spec, member, Future(), self._preludes, error=error)
        return Held(spec, member, self._load(spec, member), self._preludes)

    def _load(self, spec: GrammarSpec, member: Member) -> Future[CompiledGrammar]:
        load = partial(self._threads.submit, partial(member.backend.load, spec.artifact))
        return self._loaded.get((spec.backend, spec.artifact), load)

    def _result(self, share: Share) -> str:
        """What keeps the request from going on, or "" where its masks are there."""
        held = share.held
        if share.done is None or held.member is None or held.error:
            return held.error
        try:
            share.done = self._waited(share, share.done)
            share.done.result(0)
        except Terminated:
            raise
        except BaseException as error:  # a backend may raise anything
            held.error = self._failed(held.member, error)
        return held.error

    def _waited(self, share: Share, done: Future[None]) -> Future[None]:
        """Its masks are made, or have taken too long. Who waits behind one that is stuck has new threads, and time of its own."""
        if not done.done():
            wait([done], self._block_timeout)
        if done.done():
            return done
        self._threads.close()
        self._threads, self._masks = self._new_threads(), self._new_masks(0)
        self._loaded.drop_unfinished()
        if done.cancel():
            if share.held.member is not None and not share.held.grammar.done():
                share.held.grammar = self._load(share.held.spec, share.held.member)
            done = self._threads.submit(partial(_fill, share))
            wait([done], self._block_timeout)
        return done

    def _failed(self, member: Member, error: BaseException) -> str:
        if isinstance(error, GrammarError):  # of this grammar: nobody's failure
            return f"{member.part.who}: {told(error)}"
        reason = f"no mask within {self._block_timeout:g} s" if isinstance(error, TimeoutError) else described(error)
        self._incidents.append(member.tally.failed(reason, error))
        return f"{member.part.who}: {reason}"

    def _new_threads(self) -> DaemonThreads:
        return DaemonThreads(self._num_threads, "grammar")

    def _new_masks(self, num_rows: int) -> NDArray[np.int32]:
        """[num_rows, W], for the rows with a grammar as `touches` has them."""
        return np.empty((num_rows, mask_size(self._vocab_size)), np.int32)


def _needs_logits(params: SamplingParams) -> bool:
    """Whether forced ids come one by one, too: log-probabilities are of logits, and a mask of the request holds for all ids."""
    masks = params.allowed_token_ids is not None or params.bad_words_token_ids or params.min_tokens
    return params.logprobs is not None or bool(masks)


class Preludes:
    """What comes before grammars, by its markers: those of reasoning and tool parsers, of which there are few."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary] | None):
        self._load_vocabulary = load_vocabulary
        self._known: dict[tuple[str, str, bool], Prelude] = {}

    def around(self, matcher: Matcher, spec: GrammarSpec) -> Matcher:
        """`matcher`, behind the free text that comes before its grammar."""
        if not spec.after:
            return matcher
        key = (spec.after, spec.opening, spec.may_end)
        if key not in self._known:
            if self._load_vocabulary is None:
                raise ValueError("a grammar behind other text needs the vocabulary")
            self._known[key] = Prelude(spec, self._load_vocabulary())
        return BehindText(self._known[key], matcher)


class Loaded:
    """Grammars by backend and artifact, the latest used ones, as long as they have no more than about so many bytes."""

    def __init__(self, max_bytes: int = MAX_LOADED_BYTES):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, bytes], Future[CompiledGrammar]] = OrderedDict()

    def get(self, key: tuple[str, bytes], load: Callable[[], Future[CompiledGrammar]]) -> Future[CompiledGrammar]:
        found = self._entries.get(key)
        if found is not None and not (found.done() and found.exception()):
            self._entries.move_to_end(key)
            return found
        if found is None:
            self._num_bytes += len(key[1]) + LOADED_BYTES
        made = self._entries[key] = load()
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            (_, artifact), _ = self._entries.popitem(last=False)
            self._num_bytes -= len(artifact) + LOADED_BYTES
        return made

    def drop_unfinished(self) -> None:
        """What was to be loaded behind a thread that is stuck is loaded anew when it is asked for."""
        for key in [key for key, grammar in self._entries.items() if not grammar.done()]:
            del self._entries[key]
            self._num_bytes -= len(key[1]) + LOADED_BYTES


def _fill(share: Share) -> None:
    held = share.held
    if held.error:
        return
    if held.progress is None:
        held.progress = GrammarProgress(held.preludes.around(held.grammar.result().matcher(), held.spec))
    started = time.thread_time()
    held.progress.fill(share.rows, share.masks)
    held.spend(time.thread_time() - started, share.rows[0].position + 1)
    if share.cut_width:
        share.cuts = [Cut.of(mask, share.cut_width) for mask in share.masks]
