"""Words for what a report compares at equal in-domain loss: OOD domains, or the hold-outs of a training mix."""

from dataclasses import dataclass

from seqarch.runs import tags


@dataclass(frozen=True)
class Role:
    """The part that the compared domains have in their runs.

    `name` is part of the tags of `curves.csv` (`loss/<name>/<domain>`). The others are words for tables and figures:
    for the compared loss (`short`, `loss`), for the in-domain loss at which models are compared (`inside`, `axis`,
    `equal`), and for the gap.
    """

    name: str
    short: str
    loss: str
    inside: str
    axis: str
    equal: str
    gap: str
    every: str
    """All domains of the role."""
    one: str = ""
    """Words before the name of one domain."""
    some: str = ""
    """Words before the names of several domains."""

    def tag(self, domain: str) -> str:
        """The tag of a domain's loss."""
        return tags.loss(self.name, domain)


OOD = Role(
    name=tags.OOD,
    short="OOD",
    loss="OOD loss",
    inside="in-domain",
    axis="in-domain hold-out loss",
    equal="in-domain loss",
    gap="base-capability gap",
    every="the OOD domains",
)
"""Domains that the runs were not trained on."""
HOLD_OUT = Role(
    name=tags.IN_DOMAIN,
    short="hold-out",
    loss="hold-out loss",
    inside="held-out mix",
    axis="loss on the held-out mix",
    equal="loss on the held-out mix",
    gap="in-domain gap",
    every="the hold-outs of the training domains",
    one="the hold-out of ",
    some="the hold-outs of ",
)
"""The training domains of runs that were given no OOD domain; the in-domain loss is that of their mix."""
