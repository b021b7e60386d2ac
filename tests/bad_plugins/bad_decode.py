"""Decodes that each break one promise of `core.stages.decode`."""

from __future__ import annotations

from core.stages.decode import Plain


class PastTheEnd(Plain):
    """Four drafts, also for a request that may have one more token."""

    caught_by = "test_drafts_are_ids_for_requests_that_were_asked_about_and_have_room"

    def propose(self, requests):
        return {request.request_id: tuple(request.prompt_token_ids[:4]) for request in requests}


class ForStrangers(Plain):
    """Goes on drafting for requests that have ended."""

    caught_by = "test_requests_may_come_and_go"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._seen = {}

    def propose(self, requests):
        self._seen |= {request.request_id: () for request in requests}
        return self._seen
