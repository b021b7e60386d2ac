"""The HTTP API over a real socket with a fake front: shapes against the `openai` package's types, and the client itself."""

import importlib.util
import time
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.batch import TokenLogprobs
from core.errors import EngineDeadError, GenerationError, OverloadedError, RequestError
from core.metrics import Metrics
from core.observers import ObserverContext
from core.pipeline import PipelineDescription
from core.request import FinishReason
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront, Script
from core.testing.harness.frontend_thread import serving, wait_until
from plugins.frontends.openai_http import OpenAIHttp

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    """One server for the module; each test writes a script into its front."""
    front = FakeFront()
    metrics = Metrics(Metrics.Settings(), ObserverContext(front.model, PipelineDescription(())))
    front.observer = metrics.request_finished
    context = FrontendContext(front, PipelineDescription(()), ("fake-model", "alias"), metrics)
    settings = OpenAIHttp.Settings(port=0, admin=True, keep_alive_seconds=0.1)
    with serving(OpenAIHttp(settings, context)) as url:
        yield front, url


@pytest.fixture
def front(server):
    front = server[0]
    front.script, front.status, front.refuse = Script(), "ok", None
    front.requests.clear()
    front.aborted.clear()
    yield front
    wait_until(lambda: not front.open)


def post(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path, **body):
    """The data of each SSE event, comments left out; the last one must be [DONE]."""
    import json

    with client.stream("POST", path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def strict_chunk(chunk):
    ChatCompletionChunk.model_validate(chunk, strict=True)


def strict_completion(body):
    """The package's type has no null finish_reason, no null first logprob, though OpenAI's own server sends both."""
    choices = [dict(choice) for choice in body["choices"]]
    for choice in choices:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] is not None:
            parts = choice["logprobs"]
            first = 1 if parts["token_logprobs"] and parts["token_logprobs"][0] is None else 0
            choice["logprobs"] = {key: values[first:] for key, values in parts.items()}
    Completion.model_validate({**body, "choices": choices}, strict=True)


def load_script():
    path = Path(__file__).parents[1] / "e2e" / "openai_script.py"
    spec = importlib.util.spec_from_file_location("openai_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ANSWERS = {"json_schema": '{"city": "Oslo", "warm": true}', "choice": "yes"}  # by the kind of a request's grammar


def test_official_python_client_script(server, front):
    script = load_script()
    front.script = lambda request: Script(request.params.grammar and ANSWERS[request.params.grammar.kind])
    assert list(script.run(server[1] + "/v1")) == [step.__name__ for step in script.STEPS]


# --- chat -----------------------------------------------------------------------------------------


def test_chat_whole(client, front):
    front.script = Script("hello world", cached_tokens=3)
    body = post(client, CHAT, messages=HELLO, max_tokens=32)
    ChatCompletion.model_validate(body, strict=True)
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["model"] == "fake-model"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [True, False])
def test_c1_c3_c4_chat_stream(client, n, include_usage):
    request = {"messages": HELLO, "n": n, "seed": 3, "max_tokens": 12}
    whole = post(client, CHAT, **request)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = events(client, CHAT, **request, **options)
    for chunk in chunks:
        strict_chunk(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]


def test_e2_chat_logprobs(client, front):
    front.script = Script("🜚 hello")
    request = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    body = post(client, CHAT, **request)
    ChatCompletion.model_validate(body, strict=True)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert bytes(b for token in logprobs["content"] for b in token["bytes"]).decode() == "🜚 hello"
    assert all(len(token["top_logprobs"]) == 2 for token in logprobs["content"])
    chunks = events(client, CHAT, **request)
    for chunk in chunks:
        strict_chunk(chunk)
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert sum(streamed, []) == logprobs["content"]


def test_e1_logprobs_without_alternatives(client):
    for extra in ({}, {"top_logprobs": 0}):
        body = post(client, CHAT, messages=HELLO, logprobs=True, **extra)
        assert all(token["top_logprobs"] == [] for token in body["choices"][0]["logprobs"]["content"])


def test_stop_reason_and_other_ends(client, front):
    front.script = Script("hello world and hello")
    choice = post(client, CHAT, messages=HELLO, stop=["and", "world"])["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("hello ", "world")
    for reason in (FinishReason.REPETITION, FinishReason.ABORT):
        front.script = Script("hello", finish_reason=reason)
        choice = post(client, CHAT, messages=HELLO)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason.value)


def test_token_ids_and_prompt_logprobs(client, front):
    body = post(client, CHAT, messages=HELLO, max_tokens=4, return_token_ids=True, prompt_logprobs=1)
    ChatCompletion.model_validate(body, strict=True)
    ids = body["prompt_token_ids"]
    assert len(ids) == body["usage"]["prompt_tokens"] == len(body["prompt_logprobs"])
    assert body["prompt_logprobs"][0] is None and str(ids[1]) in body["prompt_logprobs"][1]
    assert len(body["choices"][0]["token_ids"]) == 4
    chunks = events(client, CHAT, messages=HELLO, max_tokens=4, seed=1, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == ids
    assert sum(len(c.get("token_ids", ())) for chunk in chunks for c in chunk["choices"]) == 4


# --- completions ----------------------------------------------------------------------------------


def test_completion_forms_of_prompt(client, front):
    ids = client.post("/tokenize", json={"prompt": "hello world"}).json()["tokens"]
    for prompt, count in (("hello", 1), (["hello", "world"], 2), (ids, 1), ([ids, ids[:1]], 2)):
        body = post(client, COMPLETIONS, prompt=prompt, max_tokens=3, n=2, seed=1)
        strict_completion(body)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
        assert body["usage"]["completion_tokens"] == 6 * count


def test_c3_completion_stream(client):
    request = {"prompt": ["hello", "world"], "max_tokens": 5, "n": 2, "seed": 1}
    whole = post(client, COMPLETIONS, **request)
    chunks = events(client, COMPLETIONS, **request, stream_options={"include_usage": True})
    for chunk in chunks:
        strict_completion(chunk)
    assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == [whole["usage"]]
    assert chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


@pytest.mark.parametrize("prompt", ["hello world", [40, 41, 42]])
def test_e3_echo_with_logprobs(client, prompt):
    request = {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 2, "n": 2, "seed": 5}
    whole = post(client, COMPLETIONS, **request)
    strict_completion(whole)
    chunks = events(client, COMPLETIONS, **request)
    for choice in whole["choices"]:
        parts = choice["logprobs"]
        assert parts["token_logprobs"][0] is None and parts["top_logprobs"][0] is None
        assert None not in parts["token_logprobs"][1:]
        assert len({len(values) for values in parts.values()}) == 1
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key, values in parts.items():
            assert sum((c["logprobs"][key] for c in mine if c["logprobs"]), []) == values
    if isinstance(prompt, str):
        assert whole["choices"][0]["text"].startswith(prompt)


def test_numbers_stay_finite(client, front, monkeypatch):
    monkeypatch.setattr(
        "core.testing.fake_front.FakeAnswer._row", lambda *_: TokenLogprobs(40, float("-inf"), 1, [(41, float("nan"))])
    )
    answer = client.post(COMPLETIONS, json={"prompt": "hello", "logprobs": 1, "echo": True, "max_tokens": 2})
    assert answer.status_code == 200
    assert not {"NaN", "Infinity"} & set(answer.text.replace(",", " ").split())
    assert set(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == {None, -9999.0}


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("no chat template; use /v1/completions", param="messages", code="no_chat_template"), 400),
        (OverloadedError("full", retry_after=1.5), 503),
        (EngineDeadError("gone"), 503),
        (GenerationError("nan"), 500),
        (RuntimeError("secret path"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["one", ["one", "two"]])
def test_n8_errors_before_the_first_delta_are_plain_http(client, front, error, status, stream, prompts):
    front.refuse = error
    answer = client.post(COMPLETIONS, json={"prompt": prompts, "stream": stream})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and "secret" not in body["message"]
    assert answer.headers.get("retry-after") == ("2" if isinstance(error, OverloadedError) else None)
    assert not front.open


def test_one_refused_prompt_refuses_the_call(client, front):
    answer = client.post(COMPLETIONS, json={"prompt": ["fine", ""]})
    assert answer.status_code == 400 and front.requests == []


def test_h2_context_message_names_the_field(client, front):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.post(CHAT, json={"messages": HELLO, name: 10_000, "stream": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert "2048" in answer.json()["error"]["message"] and "10000" in answer.json()["error"]["message"]


def test_d4_long_prompt_is_a_plain_400(client):
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 9000}], "stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_n3_n4_template_errors(client):
    bad = [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]
    for stream in (True, False):
        answer = client.post(CHAT, json={"messages": bad, "stream": stream})
        assert answer.status_code == 400 and "System message" in answer.json()["error"]["message"]
    for _ in range(20):
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200


def test_g1_g2_ids_past_the_vocabulary(client):
    for field in ({"logit_bias": {"191222": -100}}, {"stop_token_ids": [10**6]}, {"allowed_token_ids": [10**6]}):
        answer = client.post(CHAT, json={"messages": HELLO, **field})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))


@pytest.mark.parametrize("echo", [True, False])
def test_g3_prompt_ids_past_the_vocabulary(client, echo):
    answer = client.post(COMPLETIONS, json={"prompt": [10**6], "echo": echo})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_d3_sdk_raises_what_the_stream_says(sdk, front):
    front.script = Script("hello world again", error=GenerationError("sampler raised"), error_at=2)
    with pytest.raises(openai.APIError) as caught:
        list(sdk.chat.completions.create(model="alias", messages=HELLO, stream=True))
    assert "engine failed" in caught.value.message and caught.value.code == "generation_failed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OverloadedError("full"), openai.InternalServerError),
        (EngineDeadError("x"), openai.InternalServerError),
        (RequestError("bad", param="prompt"), openai.BadRequestError),
        (RequestError("gone", status=404), openai.NotFoundError),
        (RequestError("odd", status=422), openai.UnprocessableEntityError),
    ],
)
def test_sdk_errors_are_typed(sdk, front, error, kind):
    front.refuse = error
    with pytest.raises(kind):
        sdk.completions.create(model="fake-model", prompt="hello")


def test_sdk_retries_after_503(server, front):
    front.refuse = OverloadedError("full", retry_after=0.1)

    def script(_request):
        return Script("hello")

    with OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=1, timeout=10) as sdk:
        import threading

        threading.Timer(0.3, lambda: setattr(front, "refuse", None)).start()
        answer = sdk.completions.create(model="fake-model", prompt="hello")
    assert answer.choices[0].text


async def test_async_sdk_runs_calls_at_once(server, front):
    import asyncio

    front.script = Script(delay=0.01)
    async with AsyncOpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0, timeout=10) as sdk:

        async def one(seed):
            stream = await sdk.chat.completions.create(
                model="fake-model", messages=HELLO, seed=seed, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(seed % 4) for seed in range(16)))
    assert len(set(texts)) == 4 and texts[:4] * 4 == texts


# --- the other endpoints --------------------------------------------------------------------------


def test_models(client):
    data = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in data] == ["fake-model", "alias"]
    for model in data:
        Model.model_validate(model, strict=True)
        assert model["max_model_len"] == 2048
    assert client.get("/v1/models/alias").json()["id"] == "alias"
    assert client.get("/v1/models/a/b").status_code == 404


def test_model_names(client):
    for model in ("fake-model", "alias", "", None):
        post(client, CHAT, messages=HELLO, model=model, max_tokens=1)
    answer = client.post(CHAT, json={"messages": HELLO, "model": "gpt-x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("status", ["starting", "frozen", "dead", "draining", "ok"])
def test_health(client, front, status):
    front.status = status
    answer = client.get("/health")
    assert answer.status_code == (200 if status == "ok" else 503)
    assert answer.json() == {"status": status, "step_age": 0.01}
    assert client.head("/health").status_code == answer.status_code


def test_tokenize_and_back(client):
    text = "hello Café 🔥"
    body = post(client, "/tokenize", prompt=text, return_token_strs=True)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 2048
    assert post(client, "/detokenize", tokens=body["tokens"]) == {"prompt": text}
    assert (
        post(client, "/tokenize", messages=HELLO)["count"]
        == post(client, CHAT, messages=HELLO)["usage"]["prompt_tokens"]
    )
    for path, bad in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "1"}),
    ):
        assert client.post(path, json=bad).status_code == 400


def test_small_endpoints(client, front):
    assert client.get("/version").json()["version"]
    assert client.get("/plugins").json() == {"pipeline_hash": PipelineDescription(()).pipeline_hash, "plugins": []}
    before = front.prefix_cache_resets
    assert post(client, "/reset_prefix_cache") == {"reset": True, "requests_in_flight": 0}
    assert front.prefix_cache_resets == before + 1
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/docs", 404),
    ):
        answer = client.request(method, path)
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    told = client.post("/v1/chat/completion").json()["error"]["message"]
    assert told.startswith("There is no /v1/chat/completion; did you mean /v1/chat/completions")
    assert client.get(CHAT).json()["error"]["message"] == f"{CHAT} does not take GET: use POST."


def test_openapi_shows_the_bounds(client):
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    chat = schemas[body["$ref"].rsplit("/", 1)[1]]
    assert chat["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    refs = [part["$ref"] for name in schemas for part in _parts(schemas[name]) if "$ref" in part]
    assert refs and all(ref.rsplit("/", 1)[1] in schemas for ref in refs)


def _parts(schema):
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _parts(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _parts(value)


def test_request_id_is_echoed_in_safe_form(client):
    def echoed(value):
        return client.get("/health", headers={} if value is None else {"X-Request-Id": value}).headers["x-request-id"]

    assert echoed("abc-123") == "abc-123"
    assert echoed("a b\x1b[31m<c>") == "ab31mc"
    assert len(echoed("x" * 500)) == 128
    assert len(echoed(None)) == 32


# --- metrics --------------------------------------------------------------------------------------


def metrics_of(client):
    from prometheus_client.parser import text_string_to_metric_families

    text = client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_metrics_families(client, front):
    front.script = Script("hello world")
    post(client, CHAT, messages=HELLO)
    before = metrics_of(client).get(("nonet_http_requests_total", "404", "GET", "other"), 0)
    assert client.get("/unknown/" + "x" * 50).status_code == 404
    values = metrics_of(client)
    assert values["nonet_requests_in_flight",] == 0
    assert values["nonet_health", "ok"] == 1 and values["nonet_health", "dead"] == 0
    assert values["nonet_engine_step_age_seconds",] >= 0
    assert values["nonet_time_to_first_token_seconds_count",] >= 1
    assert values["nonet_requests_finished_total", "stop"] >= 1
    assert values["nonet_http_requests_total", CHAT, "200", "POST"] >= 1
    assert values["nonet_http_requests_total", "404", "GET", "other"] == before + 1


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"max_tokens": "many"}], ids=["whole", "stream", "refused"])
def test_the_frontends_own_time_is_counted_as_stage_1(client, front, body):
    def seconds():
        return metrics_of(client).get(("nonet_stage_seconds_total", "frontend"), 0.0)

    before = seconds()
    front.script = Script("hello world", delay=0.05)
    started = time.perf_counter()
    client.post(CHAT, json={"messages": HELLO, **body})
    wall = time.perf_counter() - started
    wait_until(lambda: seconds() > before)
    assert seconds() - before < wall  # waiting for tokens is not the frontend's


def test_c5_aborted_requests_count_once_in_both_families(client, front):
    before = metrics_of(client)
    front.script = Script(delay=0.01)
    for _ in range(5):
        with client.stream("POST", CHAT, json={"messages": HELLO, "stream": True, "max_tokens": 200}) as answer:
            next(answer.iter_bytes(64))
    wait_until(lambda: len(front.aborted) == 5 and not front.open)
    after = metrics_of(client)

    def grown(*key):
        return after[key] - before.get(key, 0)

    assert grown("nonet_requests_finished_total", "abort") == 5
    assert 5 <= grown("nonet_generation_tokens_total") < 1000
    assert grown("nonet_prompt_tokens_total") == 5 * len(front.renderer.render(front.requests[0].prompt).token_ids)
