"""What stands around plugins while they run, and what becomes of those that fail."""
