"""What queueing schedulers share, ours and other people's: a policy decides, the mechanism does the rest.

A scheduler is a `Policy` and one line: `super().__init__(settings, context, policy)` of `QueueScheduler`. A scheduler that
works in another way implements `core.stages.scheduler.Scheduler` and uses nothing of this.
"""
