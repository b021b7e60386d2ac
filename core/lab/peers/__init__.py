"""Other engines on the same machine: what is installed, the models that they read, and how each is asked."""
