"""The support matrix, read off the registries: what can be recorded, and how. `dualform support` prints it."""

from dualform.coefficients import kinds
from dualform.coefficients import optimizers as scalar
from dualform.record.layers import composites, registered
from dualform.record.optimizers import supported

KEYS = {
    "Linear": "input",
    "transformers.Conv1D": "input; the weight is stored transposed",
    "Embedding": "token, an integer; attention is 1 where tokens are equal, else 0",
    "MultiheadAttention": "the input of each projection: `in_proj` (or its slices `.q .k .v .kv`), `out_proj`",
}


def support_page() -> str:
    """Return docs/support.md."""
    lines = [
        "# What is supported",
        "",
        "Made by `dualform support` from the registries; a test keeps this page equal to it. Anything else is refused",
        "by name, listed as uncovered, or recorded keys-only where you ask for that.",
        "",
        "## Layers",
        "",
        "| layer | key |",
        "|---|---|",
        *(f"| `{name}` | {KEYS.get(name) or _key(name)} |" for name in sorted([*registered(), *composites()])),
        "",
        "One parameter may be used by several of these (a tied embedding and output layer): every use is recorded,",
        "and the identity holds for their sum.",
        "",
        "## Optimizers",
        "",
        "| optimizer | family | weights, masks, horizons, totals | contributions of single patterns |",
        "|---|---|---|---|",
        *(f"| `{name}` | {_family(name)} |" for name in supported()),
        "",
    ]
    return "\n".join(lines)


def _key(name: str) -> str:
    if name.startswith("Conv"):
        return "unfolded patch; position = output location"
    if name.startswith(("LSTM", "GRU", "RNN")):
        parts = "" if name.endswith("Cell") else ", per layer and direction (`l0`, `l0_reverse`, ...)"
        return f"[x_t ; h_{{t-1}}]{parts}"
    return "normalised input, elementwise"


def _family(name: str) -> str:
    if kind := kinds().get(name):
        return f"{kind.family} | one forward replay | a backward replay, about √S matrices held"
    assert name in scalar(), "an optimizer that is logged can be derived"
    return "scalar: one number per step | one pass in any order | one pass in any order"
