"""Admissions that each break one promise of `core.stages.admission`."""

from __future__ import annotations

import time

import msgspec

from core.stages.admission import Open


class WrongIds(Open):
    """Choices have names that nobody asked for."""

    caught_by = "test_one_request_per_choice_named_after_the_call"

    def admit(self, request, prompt_token_ids, params, load):
        admitted = super().admit(request, prompt_token_ids, params, load)
        return tuple(msgspec.structs.replace(r, request_id=r.request_id.replace("#", "-")) for r in admitted)


class OneSeed(Open):
    """Calls without a seed all get the same one."""

    caught_by = "test_a_seed_is_drawn_where_the_client_names_none"

    def admit(self, request, prompt_token_ids, params, load):
        admitted = super().admit(request, prompt_token_ids, params, load)
        return tuple(msgspec.structs.replace(r, seed=params.seed or 0) for r in admitted)


class PastContext(Open):
    """Takes requests that can never end."""

    caught_by = "test_what_can_never_fit_is_refused_by_field_and_numbers"

    def admit(self, request, prompt_token_ids, params, load):
        short = super().admit(request, prompt_token_ids[:1], params, load)
        return tuple(msgspec.structs.replace(r, prompt_token_ids=prompt_token_ids) for r in short)


class Sleeps(Open):
    """Holds up the event loop, and with it everybody."""

    caught_by = "test_the_arrival_is_read_from_the_injected_clock"

    def admit(self, request, prompt_token_ids, params, load):
        time.sleep(0.001)
        return super().admit(request, prompt_token_ids, params, load)
