"""Ends a script with one line where its user can mend the error."""

import sys
from collections.abc import Callable

from seqarch.errors import UserError, one_line


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except (UserError, FileNotFoundError) as error:
        sys.exit(f"error: {one_line(error)}")
