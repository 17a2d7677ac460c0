"""The networks of the experiments, one a file, each made by a factory that a run can remember by name.

A language model takes tokens (B, L), and a state to carry on from, and returns logits (B, L, V) and the next state.
"""

from dualform.experiments.models.lstm import LSTMLanguageModel, lstm
from dualform.experiments.models.mlp import MLP, mlp
from dualform.experiments.models.residual import ResidualNetwork, residual
from dualform.experiments.models.transformer import TransformerLanguageModel, transformer

__all__ = [
    "MLP",
    "LSTMLanguageModel",
    "ResidualNetwork",
    "TransformerLanguageModel",
    "lstm",
    "mlp",
    "residual",
    "transformer",
]
