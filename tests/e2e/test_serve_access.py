"""What of the real server is open to whom: F35 and bugs P7, P10."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from core.testing.harness.http_calls import COMPLETIONS, bounded, call, completion_body, connected
from core.testing.harness.raw_http import exchange, request_bytes
from core.testing.harness.server import RunningServer
from core.testing.tiny_models import make_tiny_model

PROMPT = "The engine was described as one engine."
KEY = "right-key-0123456789"
SECOND_KEY = "second-key-9876543210"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "keys").write_text(f"{SECOND_KEY} # for rotation\n", encoding="utf-8")
    values = [
        f"model.source={make_tiny_model(folder / 'tiny')}",
        "model.dtype=float32",
        "executor.num_threads=1",
        "cache.num_blocks=256",
        f"frontend.api_key_file={folder / 'keys'}",
        "frontend.admin=true",
    ]
    with RunningServer(values, environ={"NONET_API_KEY": KEY}) as running:
        yield running


def test_only_the_http_port_listens(server: RunningServer) -> None:
    """P10: no socket of either process listens on the network but one; the engine's socket has no name any more."""
    listening = [
        (process.pid, connection.laddr)
        for process in server.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == 2  # datagram sockets have no state
    ]
    assert listening == [(server.pid, ("127.0.0.1", server.port))]
    assert server.socket_directories() == []


PATHS = (
    *(
        "/v1/chat/completions",
        COMPLETIONS,
        "/v1/models",
        "/v1/models/tiny",
        "/tokenize",
        "/detokenize",
        "/version",
        "/plugins",
    ),
    *("/metrics", "/reset_prefix_cache", "/openapi.json", "/docs", "/redoc", "/", "/v1", "/nothing", "/v1/models/"),
    *("//v1/models", "/v1/../v1/models", "/health/../v1/models", "/V1/Models", "/health/", "/health/x", "//health"),
    *("/v1/models?path=/health", "/v1/models%2f..%2f..%2fhealth", "http://127.0.0.1/v1/models", "/v1/models;/health"),
)
VERBS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE")
NO_KEY: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": "Bearer wrong", "authorization": f"Bearer {KEY}"},
    {"X-Api-Key": KEY, "Cookie": f"Authorization={KEY}"},
    {"Host": "x/../health"},
    {"Host": "127.0.0.1/health?"},
    {"Host": "127.0.0.1\\@evil"},
    {"X-Forwarded-Prefix": "/health", "X-Original-URL": "/health"},
)


@pytest.mark.slow
async def test_no_path_opens_without_the_key(server: RunningServer) -> None:
    """F35, P7: every path, verb and trick gets 401, whether the path exists or not."""
    tries = [(verb, path, headers) for path in PATHS for verb in VERBS for headers in NO_KEY]
    tries += [(verb, f"{path}?api_key={KEY}", {}) for path in PATHS[:10] for verb in VERBS]
    jobs = [
        exchange(server.port, request_bytes(path, b"{}", method=verb, headers=headers)) for verb, path, headers in tries
    ]
    statuses = [answer.status for answer in await bounded(jobs, 8)]
    assert not [attempt for attempt, status in zip(tries, statuses, strict=True) if status != 401]


@pytest.mark.parametrize("key", [KEY, SECOND_KEY], ids=["environment", "file"])
async def test_either_key_opens_everything(server: RunningServer, key: str) -> None:
    async with connected(server, headers={"authorization": f"Bearer {key}"}) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await call(client, completion_body(PROMPT, 4))).complete
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.put("/v1/models")).status_code == 405


def test_health_is_public_and_keys_are_not_logged(server: RunningServer) -> None:
    assert server.health() == (200, "ok")
    assert KEY not in server.log() and SECOND_KEY not in server.log()
