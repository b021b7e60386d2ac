"""`python -m core <command> [overrides]`."""

from core.cli import main

raise SystemExit(main())
