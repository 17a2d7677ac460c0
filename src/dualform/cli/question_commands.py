"""Commands that ask a memory: `attend` for what inputs attend to, `mask` for what changes without some patterns."""

from typing import Annotated

import typer

from dualform.cli.options import (
    AcceptOption,
    AtOption,
    ExecutorOption,
    InputsOption,
    JsonOption,
    ModelOption,
    RunArgument,
    TokenizerOption,
    TrainOption,
    TrustOption,
    WhereOption,
    WithoutOption,
    open_view,
    select_view,
)
from dualform.errors import QueryError


def attend_command(
    run: RunArgument,
    model: ModelOption = None,
    text: Annotated[str | None, typer.Option("--text", help="A prompt, for a language model.")] = None,
    token_ids: Annotated[str | None, typer.Option("--token-ids", help='A prompt as tokens: "12 5 9".')] = None,
    tokenizer: TokenizerOption = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="With --text: how many tokens the model takes; default: as it says.", min=1),
    ] = None,
    inputs: InputsOption = None,
    test: Annotated[list[int], typer.Option("--test", "-t", help="Which inputs to ask about; repeatable.")] = [0],  # noqa: B006
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Only these layers; repeatable.")] = [],  # noqa: B006
    by: Annotated[str | None, typer.Option(help="Totals by columns: label, task,label or step:500.")] = None,
    of: Annotated[str, typer.Option(help="attention, magnitude, contribution, effect or path.")] = "attention",
    quantity: Annotated[
        str | None, typer.Option(help="Of effects: margin (the default) or loss. Of path, for a contrast: logit too.")
    ] = None,
    contrast: Annotated[
        str | None,
        typer.Option(help="With --of path: 9,7 for 9 rather than 7; default: said rather than the target or second."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="With --of path: reference inputs, the first so many inputs or a file.")
    ] = None,
    over: Annotated[str | None, typer.Option(help="With --of path: bins of steps too, as step:100.")] = None,
    tolerance: Annotated[float, typer.Option(help="With --of path: how far parts may be off, relative.")] = 0.02,
    top: Annotated[
        int | None, typer.Option(help="How many patterns to list; 0 for none; default 5, where patterns are kept.")
    ] = None,
    per: Annotated[str, typer.Option(help="Rank each pattern, or each sample over its occurrences.")] = "pattern",
    smallest: Annotated[bool, typer.Option("--smallest", help="The most negative instead.")] = False,
    where: WhereOption = None,
    without: WithoutOption = None,
    at: AtOption = None,
    accept_untrained: AcceptOption = False,
    train: TrainOption = None,
    trust: TrustOption = False,
    executor: ExecutorOption = None,
    json: JsonOption = False,
) -> None:
    """Ask what inputs attend to: totals by group, and the top training patterns; with --text, the top passages.

    With --of path: where the network's output comes from, an account of this training and no prediction of retraining.
    """
    from dualform.show.grouping import parse_by
    from dualform.show.input_answers import DEFAULT_TOP, answer_inputs, show_answers
    from dualform.show.prompt_answers import answer_prompt
    from dualform.show.terminal_tables import print_json
    from dualform.show.text_output import show_text

    if of != "path" and (contrast is not None or against is not None or over is not None):
        raise QueryError("--contrast, --against and --over are about where an output comes from: add --of path.")
    memory = open_view(run, where=where, without=without, at=at, executor=executor, train=train, trust=trust)
    prompt = _prompt(text, token_ids, tokenizer=tokenizer, context=context)
    if prompt is not None:
        spotlight = answer_prompt(
            memory,
            prompt,
            model=model,
            layers=layer,
            top=DEFAULT_TOP if top is None else top,
            tokenizer=tokenizer,
            context=context,
            accept_untrained=accept_untrained,
            trust=trust,
        )
        if json:
            print_json(spotlight)
        else:
            show_text(spotlight)
        return
    if of == "path":
        from dualform.show.path_answers import answer_path, parse_contrast, show_paths

        if layer or top is not None:
            raise QueryError("--of path goes through all layers and lists all groups: leave --layer and --top out.")
        paths = answer_path(
            memory,
            model=model,
            inputs=inputs,
            tests=test,
            by=None if by is None else parse_by(by),
            quantity=quantity,
            units=None if contrast is None else parse_contrast(contrast),
            against=against,
            over=over,
            tolerance=tolerance,
            accept_untrained=accept_untrained,
            trust=trust,
        )
        if json:
            print_json(paths)
        else:
            show_paths(paths)
        return
    answers = answer_inputs(
        memory,
        model=model,
        inputs=inputs,
        tests=test,
        layers=layer,
        by=None if by is None else parse_by(by),
        of=of,
        quantity=quantity or "margin",
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


def mask_command(
    run: RunArgument,
    where: WhereOption = None,
    without: WithoutOption = None,
    at: AtOption = None,
    model: ModelOption = None,
    inputs: InputsOption = None,
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Mask only these layers; repeatable.")] = [],  # noqa: B006
    accept_untrained: AcceptOption = False,
    train: TrainOption = None,
    trust: TrustOption = False,
    executor: ExecutorOption = None,
    json: JsonOption = False,
) -> None:
    """Say what changes without some patterns: removes recorded updates; the model is not retrained."""
    from dualform.show.mask_outcome import compare_mask, show_mask
    from dualform.show.terminal_tables import print_json

    if where is None and without is None and at is None:
        raise QueryError('Nothing is masked. Give --where, --without or --at, for example --without "label = 3".')
    memory = open_view(run, executor=executor, train=train, trust=trust)
    masked = select_view(memory, where=where, without=without, at=at)
    outcome = compare_mask(memory, masked, model, inputs, layer, accept_untrained=accept_untrained, trust=trust)
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
