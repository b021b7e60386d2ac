"""A workload through an engine of this process, with what its steps took and how far from the machine's limits they are."""

from __future__ import annotations

from core.lab.bench.figures import Report
from core.lab.bench.in_process import FrontTarget
from core.lab.bench.limits import limits
from core.lab.bench.run import Asked, rounds
from core.lab.bench.steps import StepLog, step_report
from core.outputs import StepStats
from core.progress import ProgressBars
from core.session import Session, start_front


async def bench_session(session: Session, asked: Asked) -> Report:
    log = StepLog()
    front = await start_front(session, ProgressBars(), taps=(log,))
    try:
        seen = list[list[StepStats]]()

        def with_steps(found: Report) -> Report:
            seen.append(list(log.steps))
            steps = step_report(log.steps)
            headline = {**found["headline"], "framework_share": steps["framework_share"]}
            return {**found, "headline": headline, "steps": steps}

        report = await rounds(asked, FrontTarget(front, log), 0, with_steps)
        roofline = await front.measure_roofline()  # last: it takes the machine for seconds
        if roofline is None:
            return report
        for found, steps in zip(report.get("rounds", [report]), seen, strict=True):
            found["roofline"] = limits(roofline, steps, found)
        return report
    finally:
        await front.close()
