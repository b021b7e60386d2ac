"""Clients of the HTTP frontend under test: a file's own `server` is (fake front, url), its `front` that front made clean."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI


@pytest.fixture
def client(server, front):
    with httpx.Client(base_url=server[1], timeout=10) as client:
        yield client


@pytest.fixture
def sdk(server, front):
    with OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0, timeout=10) as sdk:
        yield sdk
