"""Reports from run folders: in-domain against OOD loss, loss and entropy curves, the base-capability gap.

Only files are read: neither torch nor lightning is imported, so a report can be made anywhere.
"""

from seqarch.report.comparison import Comparison, compare, report
from seqarch.report.estimates import Gap
from seqarch.report.findings import Findings
from seqarch.report.runs import Group, Run, load_run

__all__ = ["Comparison", "Findings", "Gap", "Group", "Run", "compare", "load_run", "report"]
