"""The support matrix, read off the registries: what can be recorded, and how. `dualform support` prints it."""

from typing import Any

from dualform.identity.families import optimizer_kinds
from dualform.identity.families.optimizer_kind import OptimizerKind
from dualform.recording.layers import composites, registered

LOOP_OUTCOMES = (
    ("hand-written updates, weight clipping, `p.data` edits, EMA copied back, a checkpoint loaded in mid-run",
     "refused at the next step, with the parameter and the step; at closing a warning"),
    ("a module or parameter exchanged, optimizer state cleared or loaded, `model.double()` in mid-run",
     "refused at the next step by name"),
    ("weights reloaded before the recorder closes (`load_best_model_at_end`)",
     "a warning that says which step they are of; not stored as final"),
    ("frozen layers (adapters on a base)", "left out; a frozen low-precision base is not refused"),
    ("parameters of other modules, bare parameters in code of yours", "listed as uncovered by type and name, with "
     "their share; their final values are kept, so that the command line asks the whole model. Recorded instead: "
     "`nn.Embedding(1, width)` for a class token, a small module for `x + p` or `x * p`, `dualform.register_layer`"),
    ("weight norm, spectral norm and other parametrizations, old and new; pruning", "the layer is listed as uncovered, "
     "with what to do: its weight is computed from other parameters, which the identity does not cover"),
    ("accelerate's and Lightning's wrapped optimizers; subclasses with the parent's own step", "recorded"),
    ("LBFGS", "keys only; the last evaluation of a step is kept, and a warning says so"),
    ("DistributedDataParallel", "recorded in all processes, into one run: [several processes](distributed.md)"),
    (
        "processes that run out of batches at different times",
        "patterns, with `Join([model, recorder])`; "
        "[several processes](distributed.md#batches-that-run-out-at-different-times)",
    ),
    (
        "`fully_shard` (FSDP2) by rows, with SGD or an optimizer like Adam",
        "recorded in all processes, each of which keeps its rows of the weights and of [shares](distributed.md)",
    ),
    (
        "FSDP's first version, other divisions (HSDP, tensor parallel), DeepSpeed, pipelines, DataParallel, "
        "communication hooks that lose more than 16-bit rounding does",
        "refused by name in every process",
    ),
    ("sparse or nested inputs of a recorded layer", "refused by name"),
    ("`torch.compile`, activation checkpointing, gradient scalers, accumulation", "recorded; compiled before the "
     "recording: refused with what to do"),
    ("`torch.save(model)` while recording", "the file holds nothing of dualform"),
    ("any of these with `on_failure=\"detach\"`", "a warning, and training goes on without recording"),
)  # fmt: skip
"""Practices of training code around the layers, and the outcome of each while recording."""

ROW_OUTCOMES = (
    ("proved", "a permuted batch moved the layer's keys and values with it", "columns per row"),
    ("not aligned", "positions looked up once, prototypes, rows that are sorted, rolled or mixed",
     "null, with one warning; give `annotate(rows={layer: ...})` if you know them"),
    ("assumed", "no trial: random numbers in the forward, a model over 2 GB, hooks of yours, packed or sparse inputs",
     "columns per row by number, with one warning"),
)  # fmt: skip
"""The outcomes of aligning a layer's rows with the batch: name, when it occurs, columns of the patterns."""


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
        *(f"| `{name}` | {key_text} |" for name, key_text in sorted(_layer_keys().items())),
        "",
        "One parameter may be used by several of these (a tied embedding and output layer): every use is recorded,",
        "and the identity holds for their sum.",
        "",
        "## Optimizers",
        "",
        "| optimizer | family | weights, masks, horizons, totals | contributions of single patterns |",
        "|---|---|---|---|",
        *(f"| `{kind.optimizer.__name__}` | {_family(kind)} |" for kind in _by_name()),
        "",
        "## Around the training loop",
        "",
        "| your code | what happens |",
        "|---|---|",
        *(f"| {code} | {outcome} |" for code, outcome in LOOP_OUTCOMES),
        "",
        "## Rows and annotations",
        "",
        "At the first annotated step a copy of the model runs on the batch, and on the batch permuted (again when",
        "input shapes are new, and whenever the number of steps has doubled; where a trial left nothing open, then on",
        "eight rows of a larger batch, unless they show something else). `dualform info` shows the outcome:",
        "",
        "| outcome | when | what patterns get |",
        "|---|---|---|",
        *(f"| {outcome} | {when} | {columns} |" for outcome, when, columns in ROW_OUTCOMES),
        "",
        "Constants belong to every pattern. Where two axes of the inputs could both be the rows, `batch_axis` is asked",
        "for.",
        "",
    ]
    return "\n".join(lines)


def _layer_keys() -> dict[str, str]:
    """Return what a key is, in words, by the name of the layer."""
    layers = {name: kind.key_text for name, kind in registered().items()}
    return layers | {name: composite.key_text for name, composite in composites().items()}


def _by_name() -> list[OptimizerKind[Any]]:
    return sorted(optimizer_kinds().values(), key=lambda kind: kind.optimizer.__name__)


def _family(kind: OptimizerKind[Any]) -> str:
    if kind.has_coefficients:
        return f"{kind.family} | one pass in any order | one pass in any order"
    return f"{kind.family} | one forward replay | a backward replay, about √S matrices held"
