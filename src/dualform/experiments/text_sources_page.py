"""Findings of the study of text sources, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, costs, mean_and_deviation
from dualform.experiments.text_sources import CONTROL
from dualform.recording.estimate import size_text


def summarise_text_sources(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the study, from the findings of its seeds."""
    return [_margin_lines(findings), _mask_lines(findings), _size_lines(findings), costs(findings)]


def text_sources_section(findings: Sequence[Row], *, command: str) -> Section:
    """Return the study's section of the results page."""
    study = findings[0]["study"]
    parts = ", ".join(f"{name} {share:.0%}" for name, share in study["texts"].items())
    rows = study["updates"] * study["batch"]
    text = (
        f"A decoder-only Transformer of {findings[0]['parameters'] / 1e6:.1f} million parameters reads bytes of "
        f"several texts at once ({parts} of the rows): {study['updates']:,} updates of {study['batch']} rows of "
        f"{study['context']} bytes, AdamW with decay. No pattern is kept, only what each text made of every weight "
        f"(`keep=dualform.Shares(by=...)`). Beside the texts stand groups of the {rows:,} rows that were drawn without "
        "regard to the text, of the same sizes: the control.",
        _mask_reading(findings),
        "Every share is exact, and a mask is a subtraction; it leaves the rest of the training as it was, and is not a "
        "retraining.",
        made_by(command, len(findings)),
    )
    title = "What a language model owes to each of its texts: `dualform reproduce sources`"
    return Section("sources", title, text, summarise_text_sources(findings))


def _mask_reading(findings: Sequence[Row]) -> str:
    """Say what the masks of this study can tell: whether the control breaks the network as leaving out a text does."""
    domains = list(findings[0]["study"]["texts"])
    bits: dict[str, list[float]] = {"all": [], "text": [], "control": []}
    for found in findings:
        for entry in found["masks"]:
            if entry.get("layer"):
                continue
            kind = "all" if not entry["without"] else "control" if entry["without"].startswith(CONTROL) else "text"
            bits[kind] += [entry[domain] for domain in domains]
    everything, texts, control = (f"{min(bits[kind]):.1f} to {max(bits[kind]):.1f}" for kind in bits)
    breaks = min(bits["control"]) > (max(bits["all"]) + min(bits["text"])) / 2
    verdict = (
        "Both break the network, so the masks say little about texts here. The shares of the logits, above them, do."
        if breaks
        else "So a mask takes away what a text taught, and not only weights of that size."
    )
    return (
        f"**Read this first.** Held-out text costs {everything} bits a byte. Without what one text taught it costs "
        f"{texts}, and without as many random rows {control}. {verdict}"
    )


def _margin_lines(findings: Sequence[Row]) -> Grid:
    margins = [found["margins"] for found in findings]
    domains, groups = list(margins[0]), list(next(iter(margins[0].values()))["parts"])
    rows = [
        (
            group,
            *(
                mean_and_deviation([m[domain]["parts"][group] for m in margins], scale=1, digits=2)
                for domain in domains
            ),
        )
        for group in groups
    ]
    rows.append(("sum", *(mean_and_deviation([m[d]["sum"] for m in margins], scale=1, digits=2) for d in domains)))
    note = (
        "The logit of the true next byte beyond the mean logit, averaged over held-out text, and what each text's "
        "share of the last layer adds to it. The queries are those of the whole network."
    )
    columns = ("share of", *(f"on {domain}" for domain in domains))
    return Grid("Where the true byte's logit comes from, in the last layer", columns, tuple(rows), note)


def _mask_lines(findings: Sequence[Row]) -> Grid:
    domains = list(findings[0]["study"]["texts"])
    rows = tuple(
        (
            _mask_name(entry),
            *(mean_and_deviation([f["masks"][i][domain] for f in findings], scale=1, digits=2) for domain in domains),
        )
        for i, entry in enumerate(findings[0]["masks"])
    )
    single = any(entry.get("layer") for entry in findings[0]["masks"])
    where = "from all layers, or from the one that is named" if single else "from all layers"
    note = (
        f"A mask removes recorded updates {where}; the model is not retrained. Compare each text with the random rows "
        "of its size: where leaving those out breaks the network too, a mask of that size says little by itself."
    )
    return Grid("Bits per held-out byte of each text, after masks", ("memory", *domains), rows, note)


def _mask_name(entry: Row) -> str:
    """Return what a line of masks leaves out; findings of earlier versions have masks of all layers alone."""
    if not entry["without"]:
        return "everything"
    layer = entry.get("layer")
    return f"without {entry['without']}" + (f", {layer} alone" if layer else "")


def _size_lines(findings: Sequence[Row]) -> Grid:
    worst = [max(layer["relative_error"] for layer in found["layers"]) for found in findings]
    verdict = "Every run passed `verify`." if all(f["verified"] for f in findings) else "A RUN DID NOT PASS `verify`."
    rows = (
        ("shares on disk", size_text(findings[0]["bytes"])),
        ("parameters", f"{findings[0]['parameters']:,}"),
        ("worst rebuild error of a layer", f"{max(worst):.1e}"),
    )
    return Grid("Is it exact, and how large is it?", ("what", "value"), rows, verdict)
