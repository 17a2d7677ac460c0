"""`dualform reproduce`: run studies over seeds, print their tables, and write their sections of the results page."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from dualform.errors import QueryError
from dualform.experiments import image_studies as image_studies
from dualform.experiments import images
from dualform.experiments.checkpoint_page import checkpoints_section, summarise_checkpoints
from dualform.experiments.checkpoint_study import CheckpointStudy, reproduce_checkpoints
from dualform.experiments.findings import Row
from dualform.experiments.image_page import image_section, shares_section
from dualform.experiments.language import plans
from dualform.experiments.language import study as language
from dualform.experiments.language.language_summary import language_section
from dualform.experiments.language.language_summary import summarise_language as summarise_language
from dualform.experiments.noise_page import noise_section, summarise_noise
from dualform.experiments.noise_study import NoiseStudy, reproduce_noise
from dualform.experiments.page import Section, write_page
from dualform.experiments.path_page import path_section, summarise_path
from dualform.experiments.path_study import path_study, reproduce_path
from dualform.experiments.questions_page import write_questions
from dualform.experiments.study_summary import Grid, summarise_images, summarise_shares
from dualform.experiments.text_sources import TextSourcesStudy, reproduce_text_sources
from dualform.experiments.text_sources_page import summarise_text_sources, text_sources_section
from dualform.experiments.tuning_page import summarise_tuning, tuning_section
from dualform.experiments.tuning_study import TuningStudy, reproduce_tuning
from dualform.show.terminal_tables import console, print_grid, print_json
from dualform.tokens import SPLIT_UNITS

SEEDS_KEPT = ("first", "all", "none")
SHARES = "shares"  # keep these, in place of patterns
PAGE = Path("docs/results.md")
TEXT_SOURCES = "sources"
CHECKPOINTS = "checkpoints"
PATH = "path"
NOISE = "noise"
TUNING = "tuning"
QUESTIONS_STUDY = "questions"
QUESTIONS_PAGE = Path("docs/questions.md")


@dataclass(frozen=True, slots=True)
class ReproductionOptions:
    """The options of `dualform reproduce`.

    Attributes:
        which: a study's name, or all.
        data: the data set; nothing for the paper's.
        seeds: how many runs.
        folder: where to put them.
        keep: of which seeds to keep the recorded patterns; or shares in their place.
        page: the page to write sections to; nothing for none, or with all for the published one.
        device: where to train and attend.
        file: for text, the user's own.
        tokens: for text, chars or words.
        model: of the language studies.
        paper: the language studies at the paper's size.
        updates: of the language studies, and of each task in the continual part of path, instead of the planned number.
        units: likewise.
    """

    which: str
    data: str | None = None
    seeds: int = 1
    folder: Path = Path("runs/reproduce")
    keep: str = "first"
    page: Path | None = None
    device: str = "cpu"
    file: Path | None = None
    tokens: str | None = None
    model: str = "lstm"
    paper: bool = False
    updates: int | None = None
    units: int | None = None

    def command(self, study: str) -> str:
        """Return the command line that makes one study's findings again."""
        plain = ReproductionOptions(study)
        given = {
            "data": self.data, "file": self.file, "tokens": self.tokens, "model": self.model, "updates": self.updates,
            "units": self.units, "seeds": self.seeds, "device": self.device,
            "keep": self.keep if self.keep == SHARES else plain.keep,
        }  # fmt: skip
        parts = [f"--{name} {value}" for name, value in given.items() if value != getattr(plain, name)]
        return " ".join(["dualform reproduce", study, *parts, *(["--paper"] if self.paper else [])])


@dataclass(frozen=True, slots=True)
class StudyJob:
    """One study, ready to be run.

    Attributes:
        name: of its section and its folders.
        run: runs one seed: folder, seed, whether to keep the patterns.
        summarise: makes tables of the findings of all seeds.
        section: makes its section of the page.
    """

    name: str
    run: Callable[[Path, int, bool], Row]
    summarise: Callable[[Sequence[Row]], list[Grid]]
    section: Callable[[Sequence[Row]], Section]


def reproduce_studies(options: ReproductionOptions, *, json: bool) -> None:
    """Run one study or all of them, print their tables, and write their sections of the results page."""
    if options.keep not in (*SEEDS_KEPT, SHARES):
        raise QueryError(f"--keep is {options.keep!r}; expected one of {', '.join([*SEEDS_KEPT, SHARES])}.")
    if options.keep == SHARES and options.which != "continual":
        raise QueryError(f"--keep {SHARES} goes with the study continual; {options.which!r} looks at single patterns.")
    if options.which == QUESTIONS_STUDY:
        _write_questions_page(options)
        return
    found: dict[str, list[Row]] = {}
    sections = []
    for job in _jobs(options):
        found[job.name] = []
        for seed in range(options.seeds):
            sys.stderr.write(f"{job.name}, seed {seed} ({seed + 1} of {options.seeds})\n")
            keep_run = options.keep == "all" or (options.keep == "first" and seed == 0)
            found[job.name].append(job.run(options.folder / f"{job.name}-{seed}", seed, keep_run))
        sections.append(job.section(found[job.name]))
        if not json:
            _print(job, found[job.name], options.folder)
    target = options.page or _page_path(options)
    if target is not None:
        write_page(target, sections)
        sys.stderr.write(f"Wrote {target}\n")
    if json:
        print_json(found)


def _write_questions_page(options: ReproductionOptions) -> None:
    """Run the study of path contributions on digits, and write the page of questions from it."""
    folder = options.folder / f"{PATH}-digits-0"
    findings = reproduce_path(path_study("digits"), folder, seed=0, device=options.device, keep=options.keep != "none")
    page = options.page or QUESTIONS_PAGE
    write_questions(findings, folder / "figures", page, command=options.command(QUESTIONS_STUDY))
    sys.stderr.write(f"Wrote {page}\n")


def _page_path(options: ReproductionOptions) -> Path | None:
    """Return the page to write to: with all, and the paper's data, the published one; anything else with its runs."""
    if options.which != "all":
        return None
    return PAGE if options.data in (None, "mnist") else options.folder / "results.md"


def _print(job: StudyJob, findings: Sequence[Row], folder: Path) -> None:
    screen = console()
    for grid in job.summarise(findings):
        print_grid(screen, grid.title, grid.columns, grid.rows)
        screen.print(grid.note + "\n" if grid.note else "")
    screen.print(f"Runs and figures: {folder / f'{job.name}-0'}\n", soft_wrap=True)


def _jobs(options: ReproductionOptions) -> list[StudyJob]:
    """Return the studies asked for; all are the image studies and, on the paper's data, the language ones."""
    known = (*image_studies.IMAGE_STUDIES, *plans.LANGUAGE_STUDIES)
    which = options.which
    if which == TEXT_SOURCES:
        return [_text_sources_job(options)]
    if which == CHECKPOINTS:
        return [_checkpoints_job(options)]
    if which == PATH:
        return [_path_job(options)]
    if which == NOISE:
        return [_noise_job(options)]
    if which == TUNING:
        return [_tuning_job(options)]
    if which == "all":
        wanted = [*image_studies.IMAGE_STUDIES, *([*plans.PAPER_STUDIES] if options.data in (None, "mnist") else [])]
    elif which in known:
        wanted = [which]
    else:
        more = (*known, TEXT_SOURCES, PATH, CHECKPOINTS, NOISE, TUNING, QUESTIONS_STUDY)
        raise QueryError(f"There is no study {which!r}; expected {', '.join(more)} or all.")
    return [
        _image_job(cast("image_studies.ImageStudyName", name), options)
        if name in get_args(image_studies.ImageStudyName)
        else _language_job(cast("plans.LanguageStudyName", name), options)
        for name in wanted
    ]


def _image_job(name: image_studies.ImageStudyName, options: ReproductionOptions) -> StudyJob:
    data = options.data or "mnist"
    plan = image_studies.image_study(name, data)
    if options.keep == SHARES:
        return StudyJob(
            name=f"{name}-{data}-{SHARES}",
            run=lambda folder, seed, keep: images.reproduce_from_shares(plan, folder, seed=seed, device=options.device),
            summarise=summarise_shares,
            section=lambda findings: shares_section(findings, command=options.command(name)),
        )
    return StudyJob(
        name=f"{name}-{data}",
        run=lambda folder, seed, keep: images.reproduce_images(
            plan, folder, seed=seed, device=options.device, keep=keep
        ),
        summarise=summarise_images,
        section=lambda findings: image_section(
            name,
            findings,
            options.folder / f"{name}-{data}-0" / "figures",
            command=options.command(name),
        ),
    )


def _text_sources_job(options: ReproductionOptions) -> StudyJob:
    plain = TextSourcesStudy()
    study = replace(plain, updates=options.updates or plain.updates, width=options.units or plain.width)
    if study.width % study.heads:
        raise QueryError(f"--units is {study.width}; expected a multiple of the Transformer's {study.heads} heads.")
    return StudyJob(
        name=TEXT_SOURCES,
        run=lambda folder, seed, keep: reproduce_text_sources(
            study, folder, seed=seed, device=options.device, keep=keep
        ),
        summarise=summarise_text_sources,
        section=lambda findings: text_sources_section(findings, command=options.command(TEXT_SOURCES)),
    )


def _checkpoints_job(options: ReproductionOptions) -> StudyJob:
    study = replace(CheckpointStudy(), data=options.data or CheckpointStudy().data)
    return StudyJob(
        name=CHECKPOINTS,
        run=lambda folder, seed, keep: reproduce_checkpoints(
            study, folder, seed=seed, device=options.device, keep=keep
        ),
        summarise=summarise_checkpoints,
        section=lambda findings: checkpoints_section(findings, command=options.command(CHECKPOINTS)),
    )


def _path_job(options: ReproductionOptions) -> StudyJob:
    data = options.data or "mnist"
    study = path_study(data, updates=options.updates)
    name = f"{PATH}-{data}"
    return StudyJob(
        name=name,
        run=lambda folder, seed, keep: reproduce_path(study, folder, seed=seed, device=options.device, keep=keep),
        summarise=summarise_path,
        section=lambda findings: path_section(
            findings, options.folder / f"{name}-0" / "figures", command=options.command(PATH)
        ),
    )


def _noise_job(options: ReproductionOptions) -> StudyJob:
    study = replace(NoiseStudy(), data=options.data or NoiseStudy().data)
    return StudyJob(
        name=f"{NOISE}-{study.data}",
        run=lambda folder, seed, keep: reproduce_noise(study, folder, seed=seed, keep=keep),
        summarise=summarise_noise,
        section=lambda findings: noise_section(findings, command=options.command(NOISE)),
    )


def _tuning_job(options: ReproductionOptions) -> StudyJob:
    study = replace(TuningStudy(), width=options.units or TuningStudy().width)
    return StudyJob(
        name=TUNING,
        run=lambda folder, seed, keep: reproduce_tuning(study, folder, seed=seed, keep=keep),
        summarise=summarise_tuning,
        section=lambda findings: tuning_section(findings, command=options.command(TUNING)),
    )


def _language_job(name: plans.LanguageStudyName, options: ReproductionOptions) -> StudyJob:
    if options.model not in plans.MODEL_NAMES:
        raise QueryError(f"--model is {options.model!r}; expected {' or '.join(plans.MODEL_NAMES)}.")
    if options.tokens is not None and options.tokens not in SPLIT_UNITS:
        raise QueryError(f"--tokens is {options.tokens!r}; expected {' or '.join(SPLIT_UNITS)}.")
    if name != "text" and (options.file or options.tokens):
        raise QueryError(f"--file and --tokens go with the study text; {name} has a text of its own.")
    data = (str(options.file) if options.file else options.data) if name == "text" else None
    corpus = language.load_corpus(data or plans.TEXTS[name], options.tokens)
    plan = plans.plan(
        name,
        model=options.model,
        data=data,
        wide=len(corpus.vocabulary) > plans.WIDE_FROM,
        paper=options.paper,
        updates=options.updates,
        units=options.units,
    )
    valid = language.load_validation(data or plans.TEXTS[name], corpus)
    parts = [name, corpus.name if name == "text" else "", "" if plan.model == "lstm" else plan.model]
    title = "-".join([part for part in parts if part] + (["paper"] if plan.paper else []))
    return StudyJob(
        name=title,
        run=lambda folder, seed, keep: language.reproduce_language(
            plan, corpus, folder, seed=seed, device=options.device, keep=keep, valid=valid
        ),
        summarise=summarise_language,
        section=lambda findings: language_section(title, findings, command=options.command(name)),
    )
