"""YAML that joins Nonet's configs: one folder per config group, and presets."""
