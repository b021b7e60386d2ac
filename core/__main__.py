"""`python -m core <command> [overrides]`."""

try:
    from core.cli import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

raise SystemExit(main())
