"""Find the logits in what a model returns: a tensor, a tuple, a dictionary, or an object with `.logits`. Pure."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualform.errors import QueryError


def logits_of(outputs: Any, *, instead: str = "Wrap the model in a module that returns its logits") -> Tensor:
    """Return the tensor of logits in a model's outputs.

    A tensor is taken as it is. Of a mapping or an object, the entry or attribute `logits` is taken. Of a tuple or list,
    the first part is taken that is neither None nor a single number, since a loss may stand before the logits.

    Args:
        outputs: what the model returned.
        instead: what a person should do where there are no logits, for the error.

    >>> import torch
    >>> logits_of((torch.tensor(0.5), torch.zeros(2, 3))).shape, logits_of({"logits": torch.zeros(2, 3)}).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return logits_of(outputs["logits"], instead=instead)
    if getattr(outputs, "logits", None) is not None:
        return logits_of(outputs.logits, instead=instead)
    if isinstance(outputs, tuple | list):
        for part in outputs:
            if part is not None and not (isinstance(part, Tensor) and not part.dim()):
                return logits_of(part, instead=instead)
    raise QueryError(
        f"The model returned {_outputs_text(outputs)}; expected logits as a tensor, alone or first of a tuple, or as "
        f"the entry or attribute 'logits'. {instead}."
    )


def last_logits_of(outputs: Any, *, rows: int, length: int, batch_axis: int = 0) -> Tensor:
    """Return the logits after the last token of each row, (B, V), from a language model's outputs for tokens (B, L).

    A model may compute its logits at every position, (B, L, V), or at the last one only, (B, 1, V) or (B, V).

    Args:
        outputs: what the model returned.
        rows: B.
        length: L.
        batch_axis: which axis of the logits counts the rows; 1 for a model that takes tokens (L, B).
    """
    logits = logits_of(outputs)
    shape = tuple(logits.shape)
    if logits.dim() == 3 and shape[batch_axis] == rows and shape[1 - batch_axis] in (1, length):
        return logits.select(1 - batch_axis, -1)
    if logits.dim() == 2 and shape[0] == rows and (rows == 1 or rows != length):
        return logits
    if logits.dim() == 2 and rows == 1 and shape[0] == length:  # one sequence, flattened to its positions
        return logits[-1:]
    raise QueryError(
        f"This is no language model: it returned logits {shape} for tokens {(rows, length)}; expected "
        f"(B, L, V), or (B, 1, V) or (B, V) from a model that computes the last position only."
    )


def _outputs_text(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with the entries {', '.join(map(repr, outputs)) or 'none'}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of ({', '.join(type(part).__name__ for part in outputs)})"
    return f"a {type(outputs).__name__}"
