"""The questions that the page asks: each reads its parameters from the request and asks the panel of that name."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode

from dualform.attend.questions import Per
from dualform.engine.measures import Of
from dualform.show.grouping import group_name
from dualform.show.panels.badge import Badge, rebuild_badge
from dualform.show.panels.curves import MAX_PATTERNS, SortedAttention, sorted_attention
from dualform.show.panels.examples import Examples, Snippets, example_snippets, find_examples, list_examples
from dualform.show.panels.layer_totals import MAX_TOTALS, LayerTotals, layer_totals
from dualform.show.panels.masking import MaskEffect, mask_effect
from dualform.show.panels.occurrences import Occurrences, sample_occurrences
from dualform.show.panels.overview import Overview, run_overview
from dualform.show.panels.path_account import REFERENCE_INPUTS, PathOffer, PathUnits, offer_path, usual_units
from dualform.show.panels.prediction import ModelPrediction, model_prediction
from dualform.show.panels.timeline import Timeline, attention_timeline
from dualform.show.panels.top_patterns import MAX_RANK, Tab, TopPatterns, top_patterns
from dualform.show.session import Session
from dualform.show.text_places import CONTEXT_TOKENS, TextPlace, text_around
from dualform.show.viewer.parameters import BadQuestion, RequestParameters
from dualform.show.viewer.replays import ReplayQuestion

MAX_CONTEXT = 400  # words or pieces on each side of a place
MAX_SNIPPETS = 200  # in one answer
MAX_REPLAYED = 16  # questions of one replay
MAX_REFERENCES = 256  # inputs that one is compared with
MEASURES = ("attention", "magnitude", "contribution", "effect")

RouteAnswer = Callable[[Session, RequestParameters], Any]
"""A question: from an opened run and the parameters of a request to dataclasses, lists and numbers. May take long."""
_QUESTIONS: dict[str, RouteAnswer] = {}


def question(path: str) -> Callable[[RouteAnswer], RouteAnswer]:
    """Register the function that answers a path. It runs in a thread."""

    def register(answer: RouteAnswer) -> RouteAnswer:
        _QUESTIONS[path] = answer
        return answer

    return register


def questions() -> dict[str, RouteAnswer]:
    """Return every registered question by its path."""
    return dict(_QUESTIONS)


def question_name(path: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the name of a question: equal for equal questions, whatever their jobs are called."""
    return f"{path}?{urlencode(sorted(pair for pair in pairs if pair[0] != 'job'))}"


def read_questions(texts: Sequence[str]) -> list[ReplayQuestion]:
    """Read questions that a replay is to answer, each written as its path and parameters."""
    if not 0 < len(texts) <= MAX_REPLAYED:
        raise BadQuestion(f"There are {len(texts)} questions to a replay; expected 1 to {MAX_REPLAYED}.")
    found = []
    for text in texts:
        path, _, query = text.partition("?")
        if path not in _QUESTIONS:
            raise BadQuestion(f"There is no question {path[:80]!r}.")
        pairs = parse_qsl(query, keep_blank_values=True)
        answer, parameters = _QUESTIONS[path], RequestParameters(pairs)
        found.append(ReplayQuestion(question_name(path, pairs), partial(_call, answer, parameters)))
    return found


def _call(answer: RouteAnswer, parameters: RequestParameters, session: Session) -> Any:
    return answer(session, parameters)


@question("/api/run")
def _run(session: Session, parameters: RequestParameters) -> Overview:
    return run_overview(session)


@question("/api/badge")
def _badge(session: Session, parameters: RequestParameters) -> Badge:
    return rebuild_badge(session, parameters.by(session), wait=parameters.flag("wait"))


@question("/api/groups")
def _groups(session: Session, parameters: RequestParameters) -> dict[str, list[Any]]:
    by = parameters.by(session)
    groups = list(session.weights(by).plan.groups[:MAX_TOTALS])
    return {"groups": groups, "names": [group_name(session.media, by, group) for group in groups]}


@question("/api/tests")
def _tests(session: Session, parameters: RequestParameters) -> Examples:
    return list_examples(session)


@question("/api/snippets")
def _snippets(session: Session, parameters: RequestParameters) -> Snippets:
    count = parameters.number("count", 50, low=1, high=MAX_SNIPPETS)
    return example_snippets(session, parameters.number("first", 0), count)


@question("/api/search")
def _search(session: Session, parameters: RequestParameters) -> dict[str, list[int]]:
    words = parameters.text("text", longest=200).strip()
    if not words:
        raise BadQuestion("There is nothing to search for.")
    return {"tests": find_examples(session, words)}


@question("/api/prediction")
def _prediction(session: Session, parameters: RequestParameters) -> ModelPrediction:
    return model_prediction(session, parameters.subject(session), parameters.mask(session))


@question("/api/layers")
def _layers(session: Session, parameters: RequestParameters) -> LayerTotals:
    of = cast("Of", parameters.choice("of", MEASURES))
    by = parameters.by(session)
    return layer_totals(session, parameters.subject(session), by, of, row=parameters.optional("row"))


@question("/api/curves")
def _curves(session: Session, parameters: RequestParameters) -> SortedAttention:
    return sorted_attention(
        session,
        parameters.subject(session),
        parameters.layer(session),
        parameters.by(session),
        of=cast("Of", parameters.choice("of", ("attention", "magnitude"))),
        count=parameters.number("k", MAX_PATTERNS, low=1, high=MAX_PATTERNS),
        row=parameters.optional("row"),
    )


@question("/api/time")
def _time(session: Session, parameters: RequestParameters) -> Timeline:
    subject, layer, by = parameters.subject(session), parameters.layer(session), parameters.by(session)
    return attention_timeline(session, subject, layer, by, row=parameters.optional("row"))


@question("/api/top")
def _top(session: Session, parameters: RequestParameters) -> TopPatterns:
    return top_patterns(
        session,
        parameters.subject(session),
        parameters.layer(session),
        by=parameters.by(session),
        tab=cast("Tab", parameters.choice("tab", ("positive", "negative", "group"))),
        of=cast("Of", parameters.choice("of", MEASURES)),
        per=cast("Per", parameters.choice("per", ("pattern", "sample"))),
        first=parameters.number("first", 1, low=1, high=MAX_RANK),
        count=parameters.number("k", 12, low=1, high=60),
        steps=parameters.steps("steps"),
        row=parameters.optional("row"),
    )


@question("/api/sample")
def _sample(session: Session, parameters: RequestParameters) -> Occurrences:
    number = parameters.number("sample")
    return sample_occurrences(session, parameters.subject(session), number, row=parameters.optional("row"))


@question("/api/mask")
def _mask(session: Session, parameters: RequestParameters) -> MaskEffect:
    return mask_effect(session, parameters.mask(session))


@question("/api/path")
def _path(session: Session, parameters: RequestParameters) -> PathOffer:
    subject, by = parameters.subject(session), parameters.by(session)
    outputs = session.outputs(subject)
    units = usual_units(outputs, subject.target)
    than = parameters.text("than", "")
    if than == "itself":
        units = PathUnits(units.said, None)
    elif than:
        units = PathUnits(units.said, parameters.number("than", high=len(outputs) - 1))
    references = parameters.number("references", REFERENCE_INPUTS, high=MAX_REFERENCES)
    return offer_path(session, subject, by, units, references=references, start=parameters.flag("start_path"))


@question("/api/passage")
def _passage(session: Session, parameters: RequestParameters) -> TextPlace:
    corpus = session.media.text
    if corpus is None:
        raise BadQuestion("This run keeps no text.")
    place = parameters.number("place", high=max(len(corpus.train) - 1, 0))
    return text_around(corpus, place, context=parameters.number("context", CONTEXT_TOKENS, low=1, high=MAX_CONTEXT))
