"""One file per command of the command line; each has `run(arguments) -> exit code`."""
