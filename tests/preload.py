"""What all processes of `tests.processes` share: the parser of `seqarch fit`, which takes a third of a small run."""

from seqarch.cli.training import parser_of

parser_of("fit")
