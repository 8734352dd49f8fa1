"""A recipe becomes a model, data, a trainer and a run folder."""
