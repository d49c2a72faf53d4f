"""`python -m planner` is the command `gpipe-plan`."""

from planner.cli.main import main

if __name__ == "__main__":
    main()
