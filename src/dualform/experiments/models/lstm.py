"""The paper's language model: embedding, one LSTM layer, softmax."""

from torch import Tensor, nn
from torch.nn import functional

LstmState = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """Embedding, one-layer LSTM, and a linear layer whose softmax is the next token's distribution.

    Dropout, where there is any, is on the LSTM's input and output.
    """

    def __init__(self, *, tokens: int, embedding: int, units: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.softmax = nn.Linear(units, tokens)

    def forward(
        self, tokens: Tensor, state: LstmState | None = None
    ) -> tuple[Tensor, LstmState]:  # (B, L) -> (B, L, V)
        """Return the logits at every position, and the state after the last."""
        inputs = functional.dropout(self.embedding(tokens), self.dropout, self.training)  # (B, L, d)
        outputs, state = self.lstm(inputs, state)  # (B, L, h)
        logits = self.softmax(functional.dropout(outputs, self.dropout, self.training))
        return logits, state


def lstm(*, tokens: int, embedding: int, units: int, dropout: float = 0.0) -> LSTMLanguageModel:
    """Make an LSTM language model.

    >>> sorted({name.split(".")[0] for name, _ in lstm(tokens=9, embedding=4, units=8).named_parameters()})
    ['embedding', 'lstm', 'softmax']
    """
    return LSTMLanguageModel(tokens=tokens, embedding=embedding, units=units, dropout=dropout)
