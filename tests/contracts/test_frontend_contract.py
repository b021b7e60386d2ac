"""The built-in frontends keep the contract of stage 1."""

from __future__ import annotations

from core.testing.frontend import FrontendContract
from core.testing.suites import words_of
from plugins.frontends.chat_cli import ChatCli
from plugins.frontends.offline import Offline
from plugins.frontends.openai_http import OpenAIHttp


class TestOpenAIHttp(FrontendContract):
    component = OpenAIHttp
    settings = {"port": 0}
    provides = words_of("frontend", "openai_http")


class TestOffline(FrontendContract):
    component = Offline
    settings = {"prompt": "hello"}


class TestChatCli(FrontendContract):
    component = ChatCli
