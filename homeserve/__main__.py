"""`python -m homeserve` is the `homeserve` command."""

from homeserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
