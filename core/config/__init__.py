"""From words on a command line and YAML files to checked values, and where each came from."""
