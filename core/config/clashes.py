"""Which of the parties of a pipeline cannot work together, and what to select instead. Words only: nothing is imported here.

`core.capabilities` has the vocabulary, and makes parties of components and of the model file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType

from core.components import CHAINS

Value = str | int | bool

FILE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer": "add tokenizer.json to its folder (AutoTokenizer.from_pretrained(…).save_pretrained(folder)), "
        "or use a GGUF file"
    }
)
"""What a model file may provide, and what to do where it does not. Open until the file is read."""


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a composition. The model file is a party of the group `model` without a name, and a value in a
    config that requires something of components is one of the group `setting`."""

    group: str
    name: str
    who: str
    provides: frozenset[str] = frozenset()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    accepts: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    instead: str = ""  # of a value in a config: what to set

    @property
    def is_file(self) -> bool:
        return not self.name


@dataclass(frozen=True, slots=True)
class Fact:
    """What is so, and who says it: a config key (`said` has it as a clause), or the model file."""

    values: tuple[Value, ...]
    owner: str
    key: str = ""  # of config, where setting it would change the fact
    said: str = ""  # model.dtype=float16 is set


@dataclass(frozen=True, slots=True)
class Clash:
    """Two parties that cannot work together, and why, in a sentence that names both and the next step."""

    parties: tuple[str, str]
    word: str
    reason: str


def clashes(
    parties: Sequence[Party], facts: Mapping[str, Fact], alternatives: Sequence[Party] = ()
) -> tuple[Clash, ...]:
    """Every pair of `parties`, or party and fact, that cannot be. `alternatives` are named as what to select instead."""
    found = _unmet(parties, alternatives)
    found += _conflicting(parties, alternatives)
    return (*found, *unaccepted(parties, facts, alternatives))


def _unmet(parties: Sequence[Party], alternatives: Sequence[Party]) -> list[Clash]:
    file_read = any(party.is_file for party in parties)
    found = []
    for party in parties:
        for required in party.requires:
            group, _, word = required.partition(".")
            peers = [peer for peer in parties if peer.group == group]
            open_yet = group == "model" and word in FILE_WORDS and not file_read
            if open_yet or any(word in peer.provides for peer in peers):
                continue
            lacking = _who_lacks(group, word, peers)
            step = _next_step(party, required, alternatives)
            reason = f"{party.who} requires {required}, which {lacking} does not provide; {step}"
            found.append(Clash((party.who, lacking), required, reason))
    return found


def _who_lacks(group: str, word: str, peers: Sequence[Party]) -> str:
    """Of the two of the group `model`, the file where the word is one of files."""
    if not peers:
        return f"a pipeline without {group}"
    of_file = group == "model" and word in FILE_WORDS
    return " and ".join(peer.who for peer in peers if peer.is_file == of_file)


def _next_step(party: Party, required: str, alternatives: Sequence[Party]) -> str:
    group, _, word = required.partition(".")
    able = [other.name for other in alternatives if other.group == group and word in other.provides]
    steps = [_selecting(group, able), _instead(party, alternatives, lambda other: required not in other.requires)]
    if group == "model" and word in FILE_WORDS:
        steps[0] = FILE_WORDS[word]
    elif not able:
        words = {offered for other in alternatives if other.group == group for offered in other.provides}
        near = get_close_matches(word, sorted(words), n=1)
        hint = f" (did you mean {group}.{near[0]}?)" if near else ""
        steps[0] = f"no installed {group} provides it{hint}"
    return ", or ".join(step for step in steps if step)


def _selecting(group: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"add {' or '.join(names)} to {group}" if group in CHAINS else f"choose {_listed(group, names)}"


def _listed(group: str, names: Iterable[str]) -> str:
    return " or ".join(f"{group}={name}" for name in names)


def _instead(party: Party, alternatives: Sequence[Party], suits: Callable[[Party], bool]) -> str:
    """What to select in the place of `party`."""
    if party.instead:
        return party.instead
    if party.is_file:
        return "choose another model"
    if party.group in CHAINS:
        return f"leave {party.name} out of {party.group}"
    others = [o.name for o in alternatives if o.group == party.group and o.name != party.name and suits(o)]
    return _selecting(party.group, others)


def _conflicting(parties: Sequence[Party], alternatives: Sequence[Party]) -> list[Clash]:
    found = []
    for party in parties:
        for conflict in party.conflicts:
            for other in parties:
                if other is not party and _is_meant(conflict, other):
                    found.append(_conflict(party, other, conflict, alternatives))
    return found


def _is_meant(conflict: str, other: Party) -> bool:
    group, equals, name = conflict.partition("=")
    if equals:
        return (other.group, other.name) == (group, name)
    group, _, word = conflict.partition(".")
    return other.group == group and word in other.provides


def _conflict(party: Party, other: Party, conflict: str, alternatives: Sequence[Party]) -> Clash:
    what = "" if "=" in conflict else f", which provides {conflict}"
    steps = (
        _instead(other, alternatives, lambda candidate: not _is_meant(conflict, candidate)),
        _instead(party, alternatives, lambda candidate: conflict not in candidate.conflicts),
    )
    step = ", or ".join(dict.fromkeys(step for step in steps if step)) or "nothing installed can take their place"
    reason = f"{party.who} conflicts with {other.who}{what}; {step}"
    return Clash((party.who, other.who), conflict, reason)


def unaccepted(parties: Sequence[Party], facts: Mapping[str, Fact], alternatives: Sequence[Party]) -> list[Clash]:
    """The part of `clashes` that is about facts."""
    found = []
    for party in parties:
        for name, allowed in party.accepts.items():
            fact = facts.get(name)
            wrong = [] if fact is None else [value for value in fact.values if not _among(value, allowed)]
            if fact is not None and wrong:
                found.append(_refusal(party, name, fact, wrong, alternatives))
    return found


def _among(value: Value, allowed: Iterable[Value]) -> bool:
    """True is not 1 here."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _refusal(party: Party, name: str, fact: Fact, wrong: Sequence[Value], alternatives: Sequence[Party]) -> Clash:
    allowed = party.accepts[name]
    said = fact.said or f"{fact.owner} has {_values(wrong)}"

    def suits(other: Party) -> bool:
        return name not in other.accepts or all(_among(value, other.accepts[name]) for value in fact.values)

    steps = (f"set {fact.key}={_text(allowed[0])}" if fact.key else "", _instead(party, alternatives, suits))
    step = ", or ".join(step for step in steps if step) or "choose another model"
    reason = f"{party.who} accepts {name} {_values(allowed)}, and {said}; {step}"
    return Clash((party.who, fact.owner), name, reason)


def _values(values: Iterable[Value]) -> str:
    return ", ".join(map(_text, values))


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
