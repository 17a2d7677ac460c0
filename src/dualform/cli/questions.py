"""Commands that ask a memory: `attend` for what inputs attend to, `mask` for what changes without some patterns."""

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from dualform.cli.options import Accept, At, Inputs, Json, Model, Run, Trust, Where, Without, open_view
from dualform.errors import QueryError

if TYPE_CHECKING:
    from dualform.attend.memory import Memory


def attend(
    run: Run,
    model: Model = None,
    text: Annotated[Optional[str], typer.Option("--text", help="A prompt, for a language model.")] = None,  # noqa: UP045
    token_ids: Annotated[Optional[str], typer.Option("--token-ids", help='A prompt as tokens: "12 5 9".')] = None,  # noqa: UP045
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--tokenizer", help="With --text: package.module:name of an object with encode and decode."),
    ] = None,
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--context", help="With --text: how many tokens the model takes; default: as it says.", min=1),
    ] = None,
    inputs: Inputs = None,
    test: Annotated[list[int], typer.Option("--test", "-t", help="Which inputs to ask about; repeatable.")] = [0],  # noqa: B006
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Only these layers; repeatable.")] = [],  # noqa: B006
    by: Annotated[Optional[str], typer.Option(help="Totals by columns: label, task,label or step:500.")] = None,  # noqa: UP045
    of: Annotated[str, typer.Option(help="attention, magnitude, contribution or effect.")] = "attention",
    quantity: Annotated[str, typer.Option(help="What effects are effects on: margin or loss.")] = "margin",
    top: Annotated[int, typer.Option(help="How many patterns to list; 0 for none.")] = 5,
    per: Annotated[str, typer.Option(help="Rank each pattern, or each sample over its occurrences.")] = "pattern",
    smallest: Annotated[bool, typer.Option("--smallest", help="The most negative instead.")] = False,
    where: Where = None,
    without: Without = None,
    at: At = None,
    accept_untrained: Accept = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Ask what inputs attend to: totals by group, and the top training patterns; with --text, the top passages."""
    from dualform.show.grouping import parse_by
    from dualform.show.input_answers import answer_inputs, show_answers
    from dualform.show.tables import print_json

    memory = open_view(run, where=where, without=without, at=at)
    prompt = _prompt(text, token_ids, tokenizer=tokenizer, context=context)
    if prompt is not None:
        _attend_text(
            memory,
            prompt,
            model=model,
            layers=layer,
            top=top,
            tokenizer=tokenizer,
            context=context,
            accept_untrained=accept_untrained,
            trust=trust,
            json=json,
        )
        return
    answers = answer_inputs(
        memory,
        model=model,
        inputs=inputs,
        tests=test,
        layers=layer,
        by=None if by is None else parse_by(by),
        of=of,
        quantity=quantity,
        top=top,
        per=per,
        largest=not smallest,
        accept_untrained=accept_untrained,
        trust=trust,
    )
    if json:
        print_json(answers)
    else:
        show_answers(answers)


def mask(
    run: Run,
    where: Where = None,
    without: Without = None,
    at: At = None,
    model: Model = None,
    inputs: Inputs = None,
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Mask only these layers; repeatable.")] = [],  # noqa: B006
    accept_untrained: Accept = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Say what changes without some patterns: removes recorded updates; the model is not retrained."""
    from dualform.show.mask_outcome import compare_mask, show_mask
    from dualform.show.tables import print_json

    if where is None and without is None and at is None:
        raise QueryError('Nothing is masked. Give --where, --without or --at, for example --without "label = 3".')
    masked = open_view(run, where=where, without=without, at=at)
    outcome = compare_mask(open_view(run), masked, model, inputs, layer, accept_untrained=accept_untrained, trust=trust)
    if json:
        print_json(outcome)
    else:
        show_mask(outcome)


def _prompt(
    text: str | None, token_ids: str | None, *, tokenizer: str | None, context: int | None
) -> "str | list[int] | None":
    """Return the prompt that was given, as a text or as tokens, if there is one."""
    if text is not None and token_ids is not None:
        raise QueryError("Both --text and --token-ids were given. Give the prompt once.")
    if token_ids is not None:
        if tokenizer is not None:
            raise QueryError("--tokenizer goes with --text: --token-ids are tokens already.")
        try:
            return [int(part) for part in token_ids.replace(",", " ").split()]
        except ValueError as error:
            raise QueryError(f'--token-ids is {token_ids!r}; expected whole numbers, for example "12 5 9".') from error
    if text is None and (tokenizer is not None or context is not None):
        raise QueryError("--tokenizer and --context go with a prompt: give --text or --token-ids.")
    return text


def _attend_text(
    memory: "Memory",
    prompt: "str | list[int]",
    *,
    model: str | None,
    layers: list[str],
    top: int,
    tokenizer: str | None,
    context: int | None,
    accept_untrained: bool,
    trust: bool,
    json: bool,
) -> None:
    import dataclasses

    from dualform.show.input_answers import late_queries_text
    from dualform.show.model_loading import load_model
    from dualform.show.tables import print_json
    from dualform.show.text_output import show_text
    from dualform.show.tokenizers import load_tokenizer

    pieces = None if tokenizer is None else load_tokenizer(tokenizer)
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    found = memory.unwarned().attend_text(
        loaded.model, prompt, layers=layers or None, top=top, tokenizer=pieces, context=context, other_model=True
    )
    doubts = [*loaded.warnings, memory.unknown_text(list(found.layers)), late_queries_text(memory)]
    found = dataclasses.replace(found, notes=(*filter(None, doubts), *found.notes))
    if json:
        print_json(found)
    else:
        show_text(found)
