"""`python -m recipes`: the same as the command `samestep`."""

from samestep.__main__ import console

if __name__ == "__main__":
    console()
