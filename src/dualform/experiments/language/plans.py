"""The language studies: which text, which model, how it is trained, and what of it is worth storing.

A new text is one entry of `TEXTS`, a new model one entry of `MODELS`. Sizes are the paper's with `paper=True`, and
otherwise such that two CPU cores are done in minutes (WikiText-2: in about an hour).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import nn

from dualform.errors import DataError
from dualform.experiments.models import lstm, transformer
from dualform.recording.watch import What

LanguageStudyName = Literal["aesop", "wikitext2", "text"]
LANGUAGE_STUDIES: tuple[LanguageStudyName, ...] = get_args(LanguageStudyName)
ModelName = Literal["lstm", "transformer"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)
MemoryKind = Literal["patterns", "steps"]


@dataclass(frozen=True, slots=True)
class LanguageRecipe:
    """How a language model is made and trained, by truncated back-propagation with Adam.

    Attributes:
        units: of the LSTM, or the width of the Transformer, which is that of its embeddings too.
        embedding: the width of the LSTM's embeddings.
        updates: how many.
        dropout: the share of units left out.
        batch: streams that are read at once.
        unroll: tokens of each in one update.
        learning_rate: Adam's.
        clip: the norm that gradients are clipped at; nothing for no clipping.
        shifted: whether windows begin at other places in each epoch.
    """

    units: int
    embedding: int
    updates: int
    dropout: float = 0.0
    batch: int = 64
    unroll: int = 100
    learning_rate: float = 1e-3
    clip: float | None = 1.0
    shifted: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """What is stored of each layer: by layer name or file pattern, of which the first match decides.

    Attributes:
        layers: `"keys+values"` or `"keys"`.
        half: the layers whose patterns are stored in row-scaled float16.
    """

    layers: Mapping[str, What] = field(default_factory=lambda: {"*": "keys+values"})
    half: tuple[str, ...] = ()

    @property
    def dtype(self) -> dict[str, Literal["float16"] | None]:
        """The dtypes as `dualform.record` takes them."""
        return dict.fromkeys(self.half, "float16")

    def __str__(self) -> str:
        rest = "the rest" if len(self.layers) > 1 else "all layers"
        words = ", ".join(f"{rest if name == '*' else name} {what}" for name, what in self.layers.items())
        half = " and ".join("everything" if name == "*" else name for name in self.half)
        return f"{words}{f' ({half} in float16)' if half else ''}"


@dataclass(frozen=True, slots=True)
class LanguageStudy:
    """One study: a model on a text.

    Attributes:
        name: what `dualform reproduce` calls it.
        data: the text's name, or the path of the user's own file.
        model: lstm or transformer.
        recipe: how it is trained.
        storages: what to store, in order of preference; the first that fits on the disk is taken.
        paper: whether these are the paper's sizes.
        prompts: prompts to show, besides held-out ones.
        memory: what the run keeps: patterns, or the facts of its steps, whose patterns come back with a replay.
    """

    name: LanguageStudyName
    data: str
    model: ModelName
    recipe: LanguageRecipe
    storages: tuple[Storage, ...]
    paper: bool = False
    prompts: tuple[str, ...] = ()
    memory: MemoryKind = "patterns"


EVERYTHING = Storage()
HALF = Storage(half=("*",))
HALF_KEYS = Storage({"*": "keys"}, half=("*",))
KEYS_OF_LSTM = Storage({"lstm*": "keys", "*": "keys+values"}, half=("lstm*",))
WIDE_SOFTMAX = Storage({"softmax": "keys", "lstm*": "keys", "*": "keys+values"}, half=("softmax", "lstm*"))
KEYS_OF_BLOCKS = Storage({"blocks*": "keys", "*": "keys+values"}, half=("blocks*",))
WIDE_BLOCKS = Storage({"softmax": "keys", "blocks*": "keys", "*": "keys+values"}, half=("softmax", "blocks*"))

STORAGES: Mapping[tuple[ModelName, bool], tuple[Storage, ...]] = {  # by model, and whether the softmax is wide
    ("lstm", False): (EVERYTHING, HALF, KEYS_OF_LSTM, HALF_KEYS),
    ("lstm", True): (WIDE_SOFTMAX, HALF_KEYS),
    ("transformer", False): (KEYS_OF_BLOCKS, HALF_KEYS),
    ("transformer", True): (WIDE_BLOCKS, HALF_KEYS),
}

PAPER_STUDIES: Mapping[LanguageStudyName, LanguageRecipe] = {
    "aesop": LanguageRecipe(units=1024, embedding=64, updates=5000),
    "wikitext2": LanguageRecipe(
        units=200, embedding=200, updates=10_000, dropout=0.5, batch=128, learning_rate=3e-3, clip=1.0
    ),
}

EPOCH = 163  # updates in an epoch of WikiText-2

DEFAULT: Mapping[tuple[LanguageStudyName, ModelName], LanguageRecipe] = {
    ("aesop", "lstm"): replace(PAPER_STUDIES["aesop"], units=128, updates=300),
    ("aesop", "transformer"): LanguageRecipe(
        units=128, embedding=128, updates=2000, dropout=0.3, learning_rate=2e-3, shifted=True
    ),
    ("wikitext2", "lstm"): replace(PAPER_STUDIES["wikitext2"], updates=3 * EPOCH),
    ("wikitext2", "transformer"): replace(
        PAPER_STUDIES["wikitext2"], units=64, dropout=0.1, learning_rate=1e-3, updates=EPOCH
    ),
    ("text", "lstm"): LanguageRecipe(units=128, embedding=64, updates=300),
    ("text", "transformer"): LanguageRecipe(units=64, embedding=64, updates=300),
}

REPLAYED: tuple[tuple[LanguageStudyName, ModelName], ...] = (("aesop", "transformer"),)
"""Studies not of the paper whose runs keep steps: their patterns would fill a disk."""

TEXTS: Mapping[LanguageStudyName, str] = {"aesop": "aesop", "wikitext2": "wikitext-2", "text": "moby-dick"}
WIDE_FROM = 1000  # tokens in a vocabulary from which on the softmax layer's values are not worth storing
STUDY_PROMPTS: Mapping[LanguageStudyName, tuple[str, ...]] = {
    "wikitext2": ("Her principal role was for combat in the English Channel and other European",),
}


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """How a model is made, and which of its layers are shown.

    Attributes:
        factory: the function that makes the model, as package.module:name.
        make: the same function.
        arguments: its arguments, for a recipe and a vocabulary size.
        shown: the layers whose passages are shown for single prompts.
    """

    factory: str
    make: Callable[..., nn.Module]
    arguments: Callable[[LanguageRecipe, int], dict[str, Any]]
    shown: tuple[str, ...]


MODELS: Mapping[ModelName, LanguageModel] = {
    "lstm": LanguageModel(
        "dualform.experiments.models:lstm",
        lstm,
        lambda recipe, tokens: {
            "tokens": tokens,
            "embedding": recipe.embedding,
            "units": recipe.units,
            "dropout": recipe.dropout,
        },
        ("lstm.l0", "softmax"),
    ),
    "transformer": LanguageModel(
        "dualform.experiments.models:transformer",
        transformer,
        lambda recipe, tokens: {
            "tokens": tokens,
            "width": recipe.units,
            "heads": 4,
            "blocks": 2,
            "context": recipe.unroll,
            "dropout": recipe.dropout,
        },
        ("blocks.1.up", "softmax"),
    ),
}


def plan(
    name: LanguageStudyName,
    *,
    model: ModelName = "lstm",
    data: str | None = None,
    wide: bool = False,
    paper: bool = False,
    updates: int | None = None,
    units: int | None = None,
) -> LanguageStudy:
    """Return a study.

    Args:
        name: aesop, wikitext2, or text.
        model: lstm, the paper's, or transformer.
        data: for text, the file or the data set; by default the text that comes from a package registry.
        wide: whether the vocabulary is so large that the softmax layer's values are not worth storing.
        paper: the paper's sizes.
        updates: another number of updates.
        units: another number of units (LSTM) or width (Transformer).
    """
    if paper and (name not in PAPER_STUDIES or model != "lstm"):
        known = " and ".join(PAPER_STUDIES)
        raise DataError(f"The paper has no study {name!r} with a model {model!r}; it has LSTMs on {known}.")
    recipe = PAPER_STUDIES[name] if paper else DEFAULT[name, model]
    recipe = replace(recipe, updates=updates or recipe.updates, units=units or recipe.units)
    if model == "transformer" and recipe.units % 4:
        raise DataError(f"The Transformer is {recipe.units} wide; expected a multiple of its 4 heads.")
    return LanguageStudy(
        name,
        data or TEXTS[name],
        model,
        recipe,
        STORAGES[model, wide],
        paper,
        STUDY_PROMPTS.get(name, ()),
        "steps" if paper or (name, model) in REPLAYED else "patterns",
    )
