"""Spotlights on text: what the last token of a prompt attends to, as passages, documents and tokens of the text.

One pass over a layer's patterns gives everything: per place in the text the best single pattern, the total over all its
patterns, and how many those are. Totals of documents and tokens are sums of those. The passes of all layers share one
reading, which for a run of steps is one replay.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.context import check_context, context_of
from dualform.attend.groups import Numbered, NumberedGroups, Table
from dualform.attend.last_tokens import prompt_queries
from dualform.attend.passages import AttendedToken, Passage, by_document, by_token, gather
from dualform.attend.prompts import PromptLike, go_on, next_tokens, read_prompt
from dualform.attend.text_answers import TextLayer, TextSpotlight, Total
from dualform.corpus import PLACE, Corpus
from dualform.engine.description import LayerEntry
from dualform.engine.jobs import Pass
from dualform.engine.measures import PatternMeasure
from dualform.engine.reducers import GroupPlaces, GroupSums, PlaceState, Reducer
from dualform.errors import QueryError, UnknownLayerError
from dualform.identity.parameter_use import takes_ids
from dualform.pieces import Tokenizer
from dualform.tokens import Unit

R = TypeVar("R")
GOES_ON: Mapping[Unit, int] = {"chars": 40, "words": 10, "pieces": 20}  # tokens that a model goes on with
CANDIDATES = 20  # places per passage asked for, since places that overlap are one passage
NO_PLACES = (
    "holds no patterns with a place in the text: nothing was recorded, the mask leaves nothing, or the layer's rows "
    "are not tokens of the batch (an embedding of positions)"
)


def attend_text(
    table: Table,
    layers: Mapping[str, LayerEntry],
    corpus: Corpus,
    model: nn.Module,
    prompt: PromptLike,
    *,
    required: Collection[str],
    top: int,
    around: int,
    goes_on: int | None,
    context: int | None = None,
    tokenizer: Tokenizer | None = None,
    scores: Mapping[str, PlaceState] | None = None,
) -> TextSpotlight:
    """Ask what the last token of a prompt attends to; see `Memory.attend_text`.

    Args:
        table: the patterns.
        layers: the layers to look at.
        corpus: the text.
        model: the trained language model.
        prompt: a text, the numbers of its tokens, or the messages of a chat.
        required: layers that must have an answer; others without one are left out, and a note says why.
        top: how many passages, documents, tokens and guesses.
        around: how many tokens of a passage to show on either side.
        goes_on: how many tokens the model goes on with.
        context: how many tokens the model takes; by default as the model says.
        tokenizer: of a text in pieces.
        scores: layer -> the attention of this prompt to each place of the text (Q = 1), where it is known already.
    """
    if top < 1 or around < 0:
        raise QueryError(
            f"top is {top} and around is {around}; expected at least one passage, and no fewer than 0 tokens."
        )
    check_context(context)
    context = context_of(model) if context is None else context
    batch_axis = table.run.description.batch_axis
    read = read_prompt(corpus, prompt, context=context, tokenizer=tokenizer)
    groups = _place_groups(table, corpus)
    empty = {name: NO_PLACES for name in layers if not _any_place(table, name, groups)}
    _check_required(empty, required)
    queries, reasons = prompt_queries(
        model,
        read.tokens[None],
        {name: entry for name, entry in layers.items() if name not in empty},
        batch_axis=batch_axis,
        vocabulary=len(corpus.vocabulary),
    )
    _check_required(reasons, required)
    if not queries:
        listed = "; ".join(f"{name!r} {reason}" for name, reason in {**empty, **reasons}.items())
        raise QueryError(f"No layer can be asked about this prompt: {listed}.")
    following = next_tokens(model, corpus, read, count=top, batch_axis=batch_axis)
    count = GOES_ON[corpus.unit] if goes_on is None else goes_on
    said, notes = go_on(model, corpus, read, count=count, context=context, batch_axis=batch_axis)
    known = {} if scores is None else {name: scores[name] for name in queries if name in scores}
    unknown = {name: query for name, query in queries.items() if name not in known}
    places = {**known, **score_places(table, unknown, corpus)}
    found = {name: _text_layer(name, places[name], corpus, top=top, around=around) for name in queries}
    return TextSpotlight(
        prompt=read.text,
        notes=(*read.notes, *notes, *_left_out_notes(empty), *_left_out_notes(reasons)),
        next=following,
        goes_on=said,
        unit=corpus.unit,
        layers=found,
    )


def _check_required(reasons: Mapping[str, str], required: Collection[str]) -> None:
    """Raise where a layer that was asked for by name has no answer."""
    for name, reason in reasons.items():
        if name in required:
            raise QueryError(f"This view of layer {name!r} {reason}. Ask about other layers: layers=[...].")


def _left_out_notes(reasons: Mapping[str, str]) -> list[str]:
    """Return a note for each reason for which layers were left out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(repr(name))
    return [f"left out: {', '.join(names)}, which {reason}" for reason, names in by_reason.items()]


def _any_place(table: Table, layer: str, groups: Numbered) -> bool:
    """Say whether any kept pattern of a layer has a place in the text."""
    return any(bool((codes < groups.size).any()) for codes in table.numbered_codes(layer, groups))


def score_places(table: Table, queries: Mapping[str, Tensor], corpus: Corpus) -> dict[str, PlaceState]:
    """Attend every pattern of some layers by each layer's queries (Q, d_in), by place in the text, in one reading.

    The last group of the answers is that of patterns without a place.
    """
    reducer = GroupPlaces(len(corpus.train) + 1)
    jobs = [_place_pass(table, layer, rows, corpus, reducer) for layer, rows in queries.items()]
    return dict(zip(queries, table.executor.run(table.run, jobs), strict=True)) if jobs else {}


def place_totals(table: Table, layer: str, queries: Tensor, corpus: Corpus) -> Tensor:
    """Return the total attention of queries (Q, d_in) to each place of the text, (Q, N)."""
    size = len(corpus.train)
    return table.answer(_place_pass(table, layer, queries, corpus, GroupSums(size + 1)))[:, :size]


def _place_pass(table: Table, layer: str, queries: Tensor, corpus: Corpus, reducer: Reducer[Any, R]) -> Pass[R]:
    """Return the pass that attends a layer's patterns by queries (Q, d_in), by place in the text."""
    rows = queries if takes_ids(table.run.layer(layer).uses) else queries.float()
    groups = NumberedGroups(table, layer, _place_groups(table, corpus))
    like = rows if rows.is_floating_point() else torch.empty(0, device=rows.device)
    return Pass(layer, table, reducer, like, rows, PatternMeasure("attention"), groups=groups)


def place_counts(table: Table, layer: str, corpus: Corpus) -> Tensor:
    """Return how many patterns each place of the text has, (N,)."""
    groups = _place_groups(table, corpus)
    counts = torch.zeros(groups.size + 1, dtype=torch.int64)
    for codes in table.numbered_codes(layer, groups):
        counts += torch.bincount(torch.from_numpy(codes), minlength=groups.size + 1)
    return counts[: groups.size]


def _place_groups(table: Table, corpus: Corpus) -> Numbered:
    if PLACE not in table.names:
        raise QueryError(f"Patterns have no column {PLACE!r}; record with annotate(place=...).")
    return Numbered(PLACE, len(corpus.train))


def _text_layer(name: str, places: PlaceState, corpus: Corpus, *, top: int, around: int) -> TextLayer:
    size = len(corpus.train)
    counts, sums, highest = (found[:size].cpu() for found in (places.counts, places.sums[0], places.best[0]))
    absent = counts == 0

    def best(values: Tensor) -> tuple[Passage, ...]:
        ranked = values.masked_fill(absent, -torch.inf).topk(min(top * CANDIDATES, int((~absent).sum())))
        pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        chosen = [AttendedToken(place, value, int(counts[place])) for place, value in pairs]
        return gather(chosen, corpus, count=top, around=around)

    plain: tuple[np.ndarray, np.ndarray] = (sums.numpy(), counts.numpy())
    return TextLayer(
        layer=name,
        patterns=int(counts.sum()),
        by_pattern=best(highest.double()),
        by_total=best(sums),
        documents=tuple(Total(*row) for row in by_document(*plain, corpus, count=top)),
        tokens=tuple(Total(*row) for row in by_token(*plain, corpus, count=top)),
    )


def check_layers(wanted: Collection[str], known: Mapping[str, LayerEntry]) -> dict[str, LayerEntry]:
    """Return the wanted layers' entries, or raise with the names there are."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UnknownLayerError(f"Layer {missing[0]!r} was not recorded. There are: {', '.join(map(repr, known))}.")
    return {name: known[name] for name in wanted}
