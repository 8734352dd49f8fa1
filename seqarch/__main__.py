"""`python -m seqarch` is the command `seqarch`, but Python itself looks in the current folder first."""

import sys

from seqarch.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
