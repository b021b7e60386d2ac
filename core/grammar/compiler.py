"""Grammars compiled beside the front: a bounded queue, and the few processes that work on it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from core.errors import EngineDeadError, described
from core.grammar.compile_child import CompilerStartError, Lost
from core.grammar.compile_worker import Answer, CompileWorker, closing
from core.grammar.figures import GrammarFigures
from core.grammar.frames import Boot, Compile
from core.grammar.waiting import Job, WaitingJobs
from core.request import GrammarSpec

log = logging.getLogger("nonet.grammars")

MAX_WORKERS = 2  # the second is there while the first is held up, and in a rush
IDLE_S = 60.0  # after which the second ends
CLOSE_S = 2.0


class GrammarCompiler:
    """Nothing runs before `start` or the first `submit`. From any thread.

    A grammar that takes long, and the replacement of a process that was lost over one, hold up their own worker: others go to
    the second, which is started then.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        timeout_s: float,
        max_queued: int,
        figures: GrammarFigures,
        max_workers: int = MAX_WORKERS,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._boot = boot
        self._timeout_s = timeout_s
        self._figures = figures
        self._max_workers = max_workers
        self._idle_s = idle_s
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs = WaitingJobs(max_queued)
        self._workers: dict[CompileWorker, threading.Thread] = {}
        self._num_busy = 0  # workers with a grammar, or without a process because of one
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are."""
        with self._changed:
            return [worker.pid for worker in self._workers if worker.pid is not None]

    def start(self) -> None:
        """Have a process ready when it is needed."""
        with self._changed:
            if not self._workers and not self._closed:
                self._have_worker()

    def submit(
        self, spec: GrammarSpec, backends: Sequence[str], tenant: str = "", timeout_s: float | None = None
    ) -> Future[Answer]:
        """It may be cancelled while it waits. `timeout_s`: what is left of the grammar's time; None: it begins.

        Raises CompilerStartError, EngineDeadError; OverloadedError where too many wait, here, or later where it gives its
        place to a tenant that has fewer.
        """
        job = Job(spec, backends, self._timeout_s if timeout_s is None else timeout_s, tenant)
        with self._changed:
            if self._closed:
                raise closing()
            self._jobs.add(job)
            # one that still starts for the first time counts as free: it comes sooner than another would
            if len(self._jobs) > len(self._workers) - self._num_busy and len(self._workers) < self._max_workers:
                self._have_worker()
            if not self._workers:
                job.answer.cancel()  # whoever takes it later passes it over
                raise CompilerStartError("there is no thread for it")
            self._changed.notify()
        return job.answer

    def close(self) -> None:
        """End all processes, also in the middle of a grammar. Whoever waits gets EngineDeadError."""
        with self._changed:
            self._closed = True
            jobs = self._jobs.take_all()
            workers = dict(self._workers)
            self._changed.notify_all()
        for worker in workers:
            worker.close()
        for job in jobs:
            if job.answer.set_running_or_notify_cancel():
                job.answer.set_exception(closing())
        deadline = time.monotonic() + CLOSE_S
        for thread in workers.values():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _have_another(self) -> None:
        """A grammar takes long: who comes meanwhile, or after it was too long, does not wait for a process."""
        with self._changed:
            if not self._closed and len(self._workers) < self._max_workers:
                self._have_worker()

    def _have_worker(self) -> None:
        """One more, where the system has a thread for it: the kernel ends a process with the thread that started it.

        The lock is held, so that the thread finds itself among the workers.
        """
        worker = CompileWorker(self._boot)
        thread = threading.Thread(target=self._run, args=(worker,), name="grammar-compiler", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # those that there are go on, and the next grammar tries again
            log.error("no thread can be started to compile grammars: %s", described(error))
            return
        self._workers[worker] = thread

    def _run(self, worker: CompileWorker) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: a child must not die of Ctrl-C
        try:
            worker.prepare()
            while (job := self._next(worker)) is not None:
                try:
                    if job.answer.set_running_or_notify_cancel():
                        self._serve(worker, job)
                        worker.prepare()  # before the next one needs it
                finally:
                    with self._changed:
                        self._num_busy -= 1
        finally:
            with self._changed:
                self._workers.pop(worker, None)
            worker.drop()

    def _next(self, worker: CompileWorker) -> Job | None:
        """None: this worker is to end."""
        with self._changed:
            while not (self._jobs or self._closed):
                is_spare = len(self._workers) > 1 and worker is not next(iter(self._workers))
                if not self._changed.wait(self._idle_s) and is_spare and not self._jobs:
                    del self._workers[worker]
                    return None
            if self._closed:
                return None
            self._num_busy += 1
            return self._jobs.take()

    def _serve(self, worker: CompileWorker, job: Job) -> None:
        started = self._clock()
        try:
            answer = worker.compile(
                Compile(spec=job.spec, backends=list(job.backends)), job.timeout_s, self._have_another
            )
        except BaseException as error:  # nobody else would tell whoever waits
            if not isinstance(error, CompilerStartError | EngineDeadError):
                log.error("a grammar could not be compiled", exc_info=error)
            job.answer.set_exception(error)
            return
        self._figures.note_compiled(self._clock() - started)
        self._figures.lost_processes += isinstance(answer, Lost)
        job.answer.set_result(answer)
