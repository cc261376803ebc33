"""The errors of this adapter.

RuntimeFault (trainer_client.runtime)
└── UnsupportedModel    what a model computes cannot be computed exactly from packs; a ValueError
"""

from trainer_client.runtime import RuntimeFault


class UnsupportedModel(RuntimeFault, ValueError):
    """The model, or the job's plan for it, would train something else than its own library does."""
