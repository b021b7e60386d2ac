"""The chain of logits processors, as stage 7 runs it."""
