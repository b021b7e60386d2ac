"""Measuring a pipeline: workloads, and what a run of one costs."""
