"""The base-capability exam: any mixer against a reference, on a fixed footing, down to one verdict."""
