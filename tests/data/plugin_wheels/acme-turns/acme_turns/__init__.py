"""The newest waiting request first."""
