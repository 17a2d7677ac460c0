"""What a run lacks for a panel, and the line that a newcomer adds to the training to have it."""

from dataclasses import dataclass

from dualform.corpus import PLACE
from dualform.show.grouping import annotated_columns
from dualform.show.session import Session


@dataclass(frozen=True, slots=True)
class Hint:
    """What is missing, and the code that records it."""

    text: str
    code: str


def annotation_hints(session: Session) -> dict[str, Hint]:
    """Return, by panel, what the run does not have and the panel would show."""
    memory, columns = session.memory, session.memory.columns
    tokens = len(session.tests) > 0 and not session.tests.is_floating_point()
    hints: dict[str, Hint] = {}
    if not annotated_columns(columns):
        hints["layers"] = Hint(
            "Patterns have no groups but steps, since nothing was annotated. Say for each batch what its rows are:",
            "recorder.annotate(sample=ids, label=labels)",
        )
    if tokens and session.media.text is None:
        hints["top"] = Hint(
            "Tokens are shown as numbers. Give the tokenizer, or keep the training text in the run:",
            f"dualform view {memory.location} --tokenizer package.module:name",
        )
    elif tokens and PLACE not in columns:
        hints["top"] = Hint(
            "Passages of the training text are shown where patterns know their place in it:",
            "recorder.annotate(place=places, token=tokens); memory.add_corpus(dualform.Corpus.from_tokens(...))",
        )
    elif not tokens and "sample" not in columns:
        hints["top"] = Hint(
            "Patterns are shown by their numbers. With the number of each sample, its occurrences are summed, and it "
            "can be pinned and masked:",
            "recorder.annotate(sample=ids)",
        )
    elif not tokens and not session.media.has_images:
        hints["top"] = Hint(
            "Training samples are shown by number. To see them as images:", "recorder.media(images=pixels)"
        )
    if session.test_images is None and not tokens:
        hints["prediction"] = Hint(
            "Tests are shown by number. To see them as images:", "recorder.tests(inputs, targets, images=pixels)"
        )
    if session.targets is None and len(session.tests):
        hints["tests"] = Hint(
            "The right answers are not known, so that nothing is right or wrong here:",
            "recorder.tests(inputs, targets)",
        )
    return hints
