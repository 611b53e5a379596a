"""`python -m memguard`: the same as the console script."""

from memguard.cli import main

if __name__ == "__main__":
    main()
