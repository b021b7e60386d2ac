"""Threads for work that may get stuck: daemons, so that the end of the process does not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """At most `num_threads` of them, each started when there is work for it. Used from one thread."""

    def __init__(self, num_threads: int, name: str):
        self._num_threads = num_threads
        self._name = name
        self._num_started = 0
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._jobs.put((done, work))
        if self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        return done

    def close(self) -> None:
        """Threads end after the work that was submitted before."""
        for _ in range(self._num_started):
            self._jobs.put(None)


def _serve(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        done, work = job
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:  # of whoever waits for it
                done.set_exception(error)
        del job, done, work
