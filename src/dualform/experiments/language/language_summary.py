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

CHOSEN_BY_TEST = {("aesop", "transformer"): 18}
"""Study and model -> the number of recipes that were tried, where one was chosen by its loss on the held-out part."""


def summarise_language(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of one study, from the findings of its seeds."""
    if keeps_steps(findings[0]):
        memory = [_steps_memory_lines(findings), _replay_cost_lines(findings)]
        return [_quality(findings), _agreement(findings), *memory, costs(findings)]
    carried = [_carried(findings)] if findings[0]["carried"] else []
    return [_quality(findings), _agreement(findings), *carried, _language_exactness_lines(findings), costs(findings)]


def keeps_steps(found: Row) -> bool:
    """Say whether findings are those of a run that keeps steps, and was asked by replays."""
    return "steps_memory" in found


def language_section(name: str, findings: Sequence[Row], *, command: str) -> Section:
    """Return a study's section of the results page; `name` is the section's, and the study's own with its model."""
    study, corpus = findings[0]["study"], findings[0]["corpus"]
    options = (" --model transformer" if study["model"] == "transformer" else "") + (
        " --paper" if study["paper"] else ""
    )
    title = f"{TITLES[study['name']]}, {model_text(study)}: `dualform reproduce {study['name']}{options}`"
    text = (
        f"{corpus['train']:,} {corpus['unit']} to train on and {corpus['test']:,} held out, a vocabulary of "
        f"{corpus['vocabulary']:,}, {corpus['documents']:,} documents. {recipe_text(findings[0])} Which passages does "
        f"the next token attend to, and do they go on as the model does?{choice_text(study)}",
        made_by(command, len(findings)),
        f"Stored: {steps_text(findings[0]) if keeps_steps(findings[0]) else stored_text(findings[0])}",
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
    shifted = ", windows that begin elsewhere in each epoch" if recipe["shifted"] else ""
    return (
        f"{recipe['updates']:,} updates ({epochs:.1f} epochs) of {recipe['batch']} times {recipe['unroll']} tokens, "
        f"Adam with learning rate {recipe['learning_rate']:g}{clip}{dropout}{shifted}."
    )


def choice_text(study: Row) -> str:
    """Return a sentence on a recipe that was chosen by the very part that its model is measured on; else nothing."""
    if (study["name"], study["model"]) not in CHOSEN_BY_TEST:
        return ""
    tried = CHOSEN_BY_TEST[study["name"], study["model"]]
    return (
        f" The recipe and its number of updates were chosen among {tried} that were tried, by the same held-out part, "
        "since the text has no other: a new text would give a somewhat worse measure."
    )


def stored_text(found: Row) -> str:
    """Return a sentence on the layers that were stored and those that were left out."""
    stored = found["stored"]
    left_out = f" Left out: {stored['left_out']}." if stored["left_out"] else ""
    return (
        f"{size_text(sum(layer['bytes'] for layer in found['layers']))}; keys and values of everything, as trained, "
        f"would take {size_text(stored['whole'])}.{left_out}"
    )


def steps_text(found: Row) -> str:
    """Return a sentence on a run that keeps no patterns."""
    memory = found["steps_memory"]
    text = (
        f"{size_text(sum(memory['bytes'].values()))} of facts and marks of the steps; keys and values of everything, "
        f"as trained, would take {size_text(memory['patterns_bytes'])}. What is said about patterns here comes from "
        "running the training again."
    )
    if memory["asked_steps"] < memory["steps"]:
        text += (
            f" For want of time on the GPU it was run again as far as step {memory['asked_steps']:,} of "
            f"{memory['steps']:,}, where the command goes through all of them: tables and passages tell the trained "
            "model's attention to the patterns of these steps, and later patterns are left out."
        )
    return text


def _quality(findings: Sequence[Row]) -> Grid:
    first = findings[0]
    measure = first["quality"]["measure"]
    rows = []
    if "validation" in first["quality"]:
        value = mean_and_deviation([f["quality"]["validation"] for f in findings], scale=1.0, digits=2)
        rows.append((f"{measure} of the validation part", value))
    value = mean_and_deviation([f["quality"]["value"] for f in findings], scale=1.0, digits=2)
    rows.append((f"{measure} of the test part" if rows else measure, value))
    right = mean_and_deviation([f["prompts"]["accuracy"] for f in findings])
    count = first["prompts"]["count"]
    rows.append((f"next token right, percent of {count} prompts", right))
    seconds = first.get("one_prompt", {})
    each = ", ".join(f"{s:.1f} s in {layer}" for layer, s in seconds.items())
    note = f"Attending to one prompt took {each}." if each else ""
    return Grid("How well it predicts the held-out part", ("measure", "ours"), tuple(rows), note)


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


STEPS_FILES = {
    "annotations": "the place and the document of each pattern",
    "steps": "facts and marks of the steps",
    "initial.safetensors": "the weights at the start",
    "final.safetensors": "the weights at the end",
    "media": "the text",
}
"""The larger files of a run that keeps steps -> what they hold."""


def _steps_memory_lines(findings: Sequence[Row]) -> Grid:
    found = findings[0]["steps_memory"]
    sizes: Row = found["bytes"]
    rows = [(text, size_text(sizes[name])) for name, text in STEPS_FILES.items() if name in sizes]
    rows.append(("everything else", size_text(sum(size for name, size in sizes.items() if name not in STEPS_FILES))))
    rows.append(("the run folder", size_text(sum(sizes.values()))))
    rows.append(("keys and values of all patterns, which are not kept", size_text(found["patterns_bytes"])))
    patterns = found["layers"][-1]["patterns"]
    note = f"{found['steps']:,} steps, {patterns:,} patterns in each of {len(found['layers'])} layers."
    return Grid("Size of the memory", ("kept", "bytes"), tuple(rows), note)


def _replay_cost_lines(findings: Sequence[Row]) -> Grid:
    first = findings[0]["steps_memory"]
    plain = mean(f["steps_memory"]["plain_update_seconds"] for f in findings)

    def row(text: str, seconds: float) -> tuple[str, str, str]:
        return text, f"{1000 * seconds:.1f}", f"{seconds / plain:.2f}"

    recorded = mean(f["seconds"]["training, recorded"] / f["steps_memory"]["steps"] for f in findings)
    replayed = mean(
        f["seconds"]["replays"] / f["steps_memory"]["replays"] / f["steps_memory"]["asked_steps"] for f in findings
    )
    rows = (
        row("an update without recording, by the same deterministic kernels", plain),
        row("an update while its steps are recorded", recorded),
        row("an update in a replay that answers everything above", replayed),
    )
    times = "once" if first["replays"] == 1 else f"{first['replays']} times"
    note = (
        f"The training was run again {times} for the tables above and the passages below. All {first['asked_steps']:,} "
        f"steps that were run again were proved to be the recorded ones: calls, columns, inputs, settings, and "
        "every bit of every parameter."
    )
    note = f"{note} {first['note']}" if first.get("note") else note
    return Grid("What a replay costs", ("update", "ms", "relative"), rows, note)


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
