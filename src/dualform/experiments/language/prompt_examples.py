"""Single prompts, looked at closely, as the paper's Table 2 does."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from dualform.attend.context import context_of
from dualform.attend.memory import Memory
from dualform.attend.passages import Passage
from dualform.attend.prompts import read_prompt
from dualform.attend.text_answers import TextSpotlight
from dualform.corpus import Corpus
from dualform.engine.reducers import PlaceState
from dualform.experiments.findings import Row
from dualform.experiments.language.measure import HeldOut
from dualform.tokens import END, UNKNOWN, visible

SHOWN = 3  # prompts
TOP_PASSAGES = 3  # passages by each ranking
LENGTH = {"words": 20, "chars": 60}  # tokens of a held-out prompt


def choose_prompts(corpus: Corpus, prompts: HeldOut, given: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Return prompts, each with the token that truly follows, where that is known.

    First those given, then held-out ones that the model gets right, then wrong ones; of these, such whose next tokens
    differ and mean something: no `<unk>`, no end of a line, no punctuation.
    """
    chosen: list[tuple[str, str | None]] = [(text, None) for text in given]
    seen: set[int] = set()
    right = prompts.predicted == prompts.true
    for i in [*right.nonzero()[:, 0].tolist(), *(~right).nonzero()[:, 0].tolist()]:
        token = int(prompts.true[i])
        text = corpus.vocabulary[token]
        if token in seen or text in (UNKNOWN, END) or not text[0].isalpha():
            continue
        seen.add(token)
        tokens = corpus.words(prompts.tokens[i, -LENGTH[corpus.unit] :].numpy())
        chosen.append((("" if corpus.unit == "chars" else " ").join(tokens), visible(text)))
    return chosen[:SHOWN]


def attend_prompts(
    memory: Memory, model: nn.Module, prompts: list[tuple[str, str | None]], layers: tuple[str, ...]
) -> list[Row]:
    """Ask what each prompt attends to."""
    rows = []
    for text, target in prompts:
        spotlight = memory.attend_text(model, text, layers=layers, top=TOP_PASSAGES)
        rows.append(as_row(spotlight, target))
    return rows


def read_examples(corpus: Corpus, model: nn.Module, prompts: list[tuple[str, str | None]]) -> list[Tensor]:
    """Return the tokens (L,) of each prompt, as the model takes them."""
    return [read_prompt(corpus, text, context=context_of(model)).tokens for text, _ in prompts]


def show_scored_prompts(
    memory: Memory,
    model: nn.Module,
    prompts: list[tuple[str, str | None]],
    scores: Sequence[Mapping[str, PlaceState]],
    layers: tuple[str, ...],
) -> list[Row]:
    """Return what each prompt attends to, from its scores by place: no pattern is needed any more."""
    return [
        as_row(memory.attend_text(model, text, layers=layers, top=TOP_PASSAGES, scores=known), target)
        for (text, target), known in zip(prompts, scores, strict=True)
    ]


def as_row(spotlight: TextSpotlight, target: str | None) -> Row:
    """Return a spotlight on a prompt as findings hold it."""
    return {
        "prompt": spotlight.prompt,
        "target": target,
        "next": [[guess.token, guess.probability] for guess in spotlight.next],
        "goes_on": spotlight.goes_on,
        "layers": [
            {
                "layer": name,
                "by_pattern": [_passage_row(passage) for passage in layer.by_pattern],
                "by_total": [_passage_row(passage) for passage in layer.by_total],
                "documents": [[total.name, total.attention] for total in layer.documents],
            }
            for name, layer in spotlight.layers.items()
        ],
    }


def _passage_row(passage: Passage) -> Row:
    return {
        "attention": passage.attention,
        "occurrences": passage.occurrences,
        "document": passage.document,
        "pieces": passage.pieces(),
        "following": passage.following,
    }
