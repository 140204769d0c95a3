"""`python -m recipes`: the same as the command `accelerate-recipes`."""

from samestep.cli import console

if __name__ == "__main__":
    console()
