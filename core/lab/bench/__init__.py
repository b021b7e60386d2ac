"""What a pipeline, or a server, does with a load: workloads, the two ways to reach an engine, figures, and how far from the
machine's limits they are."""
