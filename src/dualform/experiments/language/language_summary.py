"""Findings of a language study, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence
from statistics import mean

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, costs, mean_and_deviation
from dualform.recording.estimate import size_text

TITLES = {
    "aesop": "Characters of Aesop's fables",
    "wikitext2": "Words of WikiText-2",
    "text": "A text of one's own",
}


def summarise_language(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of one study, from the findings of its seeds."""
    carried = [_carried(findings)] if findings[0]["carried"] else []
    return [_quality(findings), _agreement(findings), *carried, _language_exactness_lines(findings), costs(findings)]


def language_section(name: str, findings: Sequence[Row], *, command: str) -> Section:
    """Return a study's section of the results page; `name` is the section's, and the study's own with its model."""
    study, corpus = findings[0]["study"], findings[0]["corpus"]
    title = f"{TITLES[study['name']]}, {model_text(study)}: `dualform reproduce {study['name']}`"
    text = (
        f"{corpus['train']:,} {corpus['unit']} to train on and {corpus['test']:,} held out, a vocabulary of "
        f"{corpus['vocabulary']:,}, {corpus['documents']:,} documents. {recipe_text(findings[0])} Which passages does "
        "the next token attend to, and do they go on as the model does?",
        made_by(command, len(findings)),
        f"Stored: {stored_text(findings[0])}",
    )
    return Section(name, title, text, summarise_language(findings), more=example_tables(findings[0]["examples"]))


def model_text(study: Row) -> str:
    """Return a model in words."""
    units = study["recipe"]["units"]
    return f"LSTM of {units:,} units" if study["model"] == "lstm" else f"Transformer of width {units:,}"


def recipe_text(found: Row) -> str:
    """Return how a model was trained, in words."""
    recipe = found["study"]["recipe"]
    epochs = recipe["updates"] * recipe["batch"] * recipe["unroll"] / found["corpus"]["train"]
    dropout = f", dropout {recipe['dropout']:g}" if recipe["dropout"] else ""
    clip = "" if recipe["clip"] is None else f", gradient norm clipped at {recipe['clip']:g}"
    return (
        f"{recipe['updates']:,} updates ({epochs:.1f} epochs) of {recipe['batch']} times {recipe['unroll']} tokens, "
        f"Adam with learning rate {recipe['learning_rate']:g}{clip}{dropout}."
    )


def stored_text(found: Row) -> str:
    """Return a sentence on the layers that were stored and those that were left out."""
    stored = found["stored"]
    left_out = f" Left out: {stored['left_out']}." if stored["left_out"] else ""
    return (
        f"{size_text(sum(layer['bytes'] for layer in found['layers']))}; keys and values of everything, as trained, "
        f"would take {size_text(stored['whole'])}.{left_out}"
    )


def _quality(findings: Sequence[Row]) -> Grid:
    measure = findings[0]["quality"]["measure"]
    value = mean_and_deviation([f["quality"]["value"] for f in findings], scale=1.0, digits=2)
    right = mean_and_deviation([f["prompts"]["accuracy"] for f in findings])
    seconds = findings[0]["one_prompt"]
    note = "Attending to one prompt took " + ", ".join(f"{s:.1f} s in {layer}" for layer, s in seconds.items()) + "."
    count = findings[0]["prompts"]["count"]
    rows = ((measure, value), (f"next token right, percent of {count} prompts", right))
    return Grid("How well it predicts the held-out part", ("measure", "ours"), rows, note)


def _agreement(findings: Sequence[Row]) -> Grid:
    rows = tuple(
        (
            entry["layer"] or "chance",
            entry["by"],
            mean_and_deviation([f["agreement"][i]["predicted"] for f in findings]),
            mean_and_deviation([f["agreement"][i]["true"] for f in findings]),
        )
        for i, entry in enumerate(findings[0]["agreement"])
    )
    count = findings[0]["prompts"]["count"]
    title = f"The token that followed the attended one is ..., percent of {count} held-out prompts"
    note = (
        "Chance is exact: the share of all patterns, or of all patterns of the prompt's last token, that are followed "
        "by that token. An embedding attends to its own token alone, so chance of the same token is what it has."
    )
    return Grid(title, ("layer", "attended", "what the model says", "what is true"), rows, note)


def _carried(findings: Sequence[Row]) -> Grid:
    rows = tuple(
        (
            f"{entry['patterns']:,}",
            mean_and_deviation([f["carried"][i]["share"] for f in findings], digits=2),
            f"{100 * entry['of_all_patterns']:.1g}",
        )
        for i, entry in enumerate(findings[0]["carried"])
    )
    note = (
        "The patterns of the softmax layer that contribute most to the predicted token's logit, over what all of them "
        "together contribute, summed over the prompts. Contributions have both signs."
    )
    columns = ("top patterns", "percent of the logit", "percent of all patterns")
    return Grid("How much of a prediction's logit the top patterns carry", columns, rows, note)


def _language_exactness_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for i, entry in enumerate(findings[0]["layers"]):
        errors = [f["layers"][i]["relative_error"] for f in findings]
        error = "-" if errors[0] is None else f"{mean(errors):.1e}"
        rows.append(
            (entry["layer"], f"{entry['patterns']:,}", entry["store"], entry["dtype"], size_text(entry["bytes"]), error)
        )
    verdict = "Every run passed `verify`." if all(f["verified"] for f in findings) else "A RUN DID NOT PASS `verify`."
    columns = ("layer", "patterns", "what", "in", "stored", "rebuild error")
    return Grid("Is it exact? Weights rebuilt from the patterns", columns, tuple(rows), verdict)


def example_tables(examples: Sequence[Row]) -> str:
    """Return single prompts with the passages they attend to, as Markdown, like the paper's Table 2."""
    lines = []
    for example in examples:
        said = ", ".join(f"{_safe(token)} {100 * share:.0f} %" for token, share in example["next"])
        truth = f" True: {_safe(example['target'])}." if example["target"] else ""
        lines.append(f"### “… {_safe(_without_breaks(example['prompt']))}”\n")
        lines.append(f"The model says next: {said}.{truth} It goes on: {_safe(_without_breaks(example['goes_on']))}\n")
        lines.append("| layer | by | attention | occurrences | document | passage |\n|---|---|---|---|---|---|")
        for layer in example["layers"]:
            for by, passages in (("pattern", layer["by_pattern"]), ("total", layer["by_total"])):
                lines += [f"| {layer['layer']} | {by} | {_passage_lines(passage)} |" for passage in passages]
        lines.append("")
    return "\n".join(lines)


def _passage_lines(passage: Row) -> str:
    text = "".join(f"<b>{_safe(piece)}</b>" if bold else _safe(piece) for piece, bold in passage["pieces"])
    cells = (f"{passage['attention']:.4g}", f"{passage['occurrences']:,}", _safe(passage["document"]), text)
    return " | ".join(cells)


def _without_breaks(text: str) -> str:
    return text.replace("\n", "⏎")


def _safe(text: str) -> str:
    """Return text with the characters escaped that Markdown would interpret."""
    escaped = "".join(f"\\{sign}" if sign in "\\`*_{}[]#|~" else sign for sign in text)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")
