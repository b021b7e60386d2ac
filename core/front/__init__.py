"""The front half of the pipeline: stages 2, 3 and 8, and the calls in flight."""
