"""Between the front and the engine: threads, frames waiting, the life of a child process."""
