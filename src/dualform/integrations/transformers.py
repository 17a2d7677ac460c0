"""Record a training by a `Trainer` of transformers, with its samples' numbers and columns; trainers of trl too.

    from dualform.integrations.transformers import record

    with record(trainer, "runs/gpt", columns=["source"]):
        trainer.train()

A callback of a `Trainer` sees neither the trainer nor a batch, and does not hear of an exception. So this is a context
manager around `trainer.train()`: while it lasts, the trainer's data set, collator and `training_step` carry the
samples' columns, and a callback starts the recorder when the checkpoint to resume from is loaded. At the end all of it
is taken off, whatever happened. Under `torchrun` every process does the same, with the same path.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

import dualform
from dualform.errors import AnnotationError, RefusedError
from dualform.integrations.carried_columns import (
    CARRIED,
    SAMPLE,
    CarriedColumns,
    CarryingCollator,
    CarryingDataset,
    CarryingStream,
)
from dualform.integrations.resuming import Resume, decide_resume
from dualform.integrations.trackers import as_trackers, track_end, track_step
from dualform.integrations.training_text import TrainingText
from dualform.recording.annotations import RESERVED
from dualform.recording.processes import refuse_wrapped, unwrap_model
from dualform.recording.sharded_modules import is_sharded_module
from dualform.recording.user_warnings import warn_user
from dualform.recording.watch import find_candidates

Annotate = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Makes columns of a batch as the model takes it."""
OWN_COLUMNS = (SAMPLE, "label", "token", "place", "chosen")
"""Columns that the recording makes itself."""


@contextlib.contextmanager
def record(
    trainer: Any,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] = (),
    annotate: Annotate | None = None,
    position_ids: bool = False,
    text: bool | None = None,
    resume: Resume = "auto",
    trackers: Any = None,
    **options: Any,
) -> Iterator["TrainerRecording"]:
    """Record the training by a `Trainer` while the context lasts.

    Patterns are annotated with `sample`, the place of their sample in the training data (not for a stream, whose
    samples have no place); with `columns`; with `label` where a batch has one whole number per sample as `labels`; and
    with `token` where the model takes `input_ids` and has no decoder beside its encoder. Adapters of peft, and whatever
    else is frozen, need no word: recorded is what the optimizer trains.

    Args:
        trainer: a `Trainer` of transformers, or of trl.
        path: the run folder to make.
        columns: columns of the training data to annotate patterns with. The model need not know them, and
            `remove_unused_columns` may stay as it is.
        annotate: makes further columns of a batch, as `Recorder.annotate` takes them.
        position_ids: give the model the positions of each row as an input, so that the patterns of a table of positions
            belong to samples too. The table's gradient is then added up in another order, and the trained weights are
            no longer those of an unrecorded training to the last bit.
        text: whether to keep the training text in the run, for `Memory.attend_text`; by default where the model's
            tokens are annotated and the trainer has a tokenizer (`processing_class`).
        resume: continue the run in `path` with the trainer's checkpoint, as `dualform.record` takes it; `"auto"` where
            the trainer resumes from a checkpoint and there is a run.
        trackers: where to send the recording's numbers: a SummaryWriter of TensorBoard, a run of W&B, a function of a
            step and its numbers; or several in a list.
        options: everything else that `dualform.record` takes: `layers`, `dtype`, `keep`, ...
    """
    recording = TrainerRecording(
        trainer,
        path,
        columns=columns,
        annotate=annotate,
        position_ids=position_ids,
        text=text,
        resume=resume,
        trackers=trackers,
        options=options,
    )
    with recording.attached():
        yield recording


class TrainerRecording:
    """The recording of one `trainer.train()`. Made by `record`.

    Attributes:
        recorder: the recorder, from the beginning of the training on.
    """

    def __init__(
        self,
        trainer: Any,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str],
        annotate: Annotate | None,
        position_ids: bool,
        text: bool | None,
        resume: Resume,
        trackers: Any,
        options: Mapping[str, Any],
    ) -> None:
        if not all(hasattr(trainer, name) for name in ("training_step", "callback_handler", "train_dataset")):
            raise TypeError(
                f"record() got a {type(trainer).__name__}; expected a Trainer of transformers. For a training loop of "
                "your own use dualform.record(model, optimizer, path)."
            )
        named = [columns] if isinstance(columns, str) else list(columns)
        taken = [name for name in named if name in (*OWN_COLUMNS, *RESERVED)]
        if taken:
            raise AnnotationError(
                f"columns names {taken[0]!r}, which patterns have already: {', '.join(OWN_COLUMNS)} are made by the "
                f"recording and {', '.join(RESERVED)} are addresses. Rename the column of the data set."
            )
        self.recorder: dualform.Recorder | None = None
        self._trainer = trainer
        self._path = path
        self._columns = named
        self._annotate = annotate
        self._position_ids = position_ids
        self._wants_text = text
        self._text: TrainingText | None = None
        self._resume = resume
        self._trackers = as_trackers(trackers)
        self._options = dict(options)
        self._told = False  # whether the user was warned that batches carry nothing

    # The trainer, while the context lasts -------------------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Attach everything to the trainer; take it off and close the recording at the end, whatever happened."""
        callback = _RecordingCallback(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._carrying())
            self._trainer.add_callback(callback)
            stack.callback(self._trainer.remove_callback, callback)
            try:
                yield
            except BaseException as error:
                self.close(error)
                raise
            if self.recorder is None:
                warn_user("Nothing was recorded: trainer.train() was not called while the recording lasted.")
            self.close(None)

    @contextlib.contextmanager
    def _carrying(self) -> Iterator[None]:
        """Let the trainer's data, collator and training step carry columns while the context lasts."""
        trainer, data = self._trainer, self._trainer.train_dataset
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(trainer, "training_step", self._training_step(trainer.training_step)))
            if hasattr(trainer, "_load_best_model"):  # weights of an earlier step, loaded after the last one
                stack.enter_context(
                    _replaced(trainer, "_load_best_model", self._closing_before(trainer._load_best_model))
                )
            if data is not None and (self._columns or not isinstance(data, IterableDataset)):
                stream = isinstance(data, IterableDataset)
                carrying = CarryingStream(data, self._columns) if stream else CarryingDataset(data, self._columns)
                stack.enter_context(_replaced(trainer, "train_dataset", carrying))
                stack.enter_context(_replaced(trainer, "data_collator", CarryingCollator(trainer.data_collator)))
                if hasattr(trainer, "_set_signature_columns_if_needed"):
                    trainer._set_signature_columns_if_needed()  # the inputs that are not removed as unused
                    known = [*trainer._signature_columns, CARRIED]
                    stack.enter_context(_replaced(trainer, "_signature_columns", known))
                if hasattr(trainer, "_get_train_sampler"):
                    sampler = _sampler_of(trainer, data)
                    stack.enter_context(_replaced(trainer, "_get_train_sampler", sampler))
            yield

    def _training_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            carried = inputs.pop(CARRIED, None) if isinstance(inputs, MutableMapping) else None
            if self.recorder is not None:
                self._annotate_batch(inputs, carried)
            return inner(model, inputs, *args, **kwargs)

        return training_step

    def _closing_before(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            self.close(None)
            return inner(*args, **kwargs)

        return load

    # One training -------------------------------------------------------------------------------------------------

    def start(self, model: Any, optimizer: Any, *, step: int) -> None:
        """Start the recorder: the model and its optimizer stand where the training begins, or goes on."""
        if self.recorder is not None:
            raise RefusedError(
                "trainer.train() began a second time in one recording (called again, or begun anew with a smaller "
                "batch by auto_find_batch_size). Record each training in a with statement and a folder of its own."
            )
        wrapped = _uncompiled(self._trainer.model_wrapped)
        refuse_wrapped(unwrap_model(wrapped))
        if any(map(is_sharded_module, model.modules())):
            raise RefusedError(
                "The trainer divides its model by fully_shard, which its recorder does not support. Train with "
                "DistributedDataParallel; or record in a loop of your own, by dualform.record in every process."
            )
        if self._trainer.accelerator.num_processes > 1 and _uncompiled(unwrap_model(wrapped)) is not model:
            raise RefusedError(
                f"The trainer wraps its model in a {type(wrapped).__name__} to train it in several processes, which is "
                "not supported. Train with DistributedDataParallel, or in one process."
            )
        self._refuse_dispatched()
        resume = decide_resume(self._resume, self._path, step=step)
        layers = self._options.get("layers", "trained")
        layers = _layers_seen(model) if layers in (None, "trained") else layers
        if self._keeps_text(model):
            self._text = TrainingText(_earlier_text(self._path) if resume else None)
        recorder = dualform.record(
            wrapped if unwrap_model(wrapped) is model else model,  # the wrapper knows the processes
            optimizer,
            self._path,
            **{**self._options, "resume": resume, "layers": layers},
        )
        recorder.start()
        self.recorder = recorder

    def saved(self) -> None:
        """Publish the text and everything recorded, so that a run can go on from a checkpoint just saved."""
        if self.recorder is not None:
            self._keep_text()
            self.recorder.flush()

    def stepped(self) -> None:
        """Tell the trackers what was recorded of a step."""
        if self.recorder is not None:
            track_step(self._trackers, self.recorder)

    def close(self, error: BaseException | None) -> None:
        """Close the recorder, where there is one that is not closed; with the error that ends the training, if any."""
        recorder = self.recorder
        if recorder is None or recorder.closed:
            return
        try:
            self._keep_text()
        finally:
            recorder.__exit__(None if error is None else type(error), error, None)
        if error is None:
            track_end(self._trackers, self._path)

    def _refuse_dispatched(self) -> None:
        """Refuse batches with columns that the first process reads for all others: only their tensors are sent."""
        accelerator, data = self._trainer.accelerator, self._trainer.train_dataset
        if accelerator.num_processes == 1 or not isinstance(data, CarryingDataset | CarryingStream):
            return
        dispatched = accelerator.dispatch_batches  # None: where the training data is a stream
        if isinstance(data, CarryingStream) if dispatched is None else dispatched:
            raise RefusedError(
                "The first process reads the batches of all processes (dispatch_batches), and the samples' columns do "
                "not travel with them. Let every process read its own: "
                'TrainingArguments(accelerator_config={"dispatch_batches": False}).'
            )

    # Columns ------------------------------------------------------------------------------------------------------

    def _annotate_batch(self, inputs: Any, carried: CarriedColumns | None) -> None:
        assert self.recorder is not None, "a batch is annotated while the recorder is there"
        columns: dict[str, Any] = {}
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
        tokens = tensors.get("input_ids")
        rows = len(tokens if tokens is not None else next(iter(tensors.values()), ()))
        if carried is not None:
            columns |= self._by_row(carried, rows, tokens)
        elif isinstance(self._trainer.train_dataset, CarryingDataset | CarryingStream):
            self._miss_columns()
        labels = tensors.get("labels")
        if labels is not None and labels.shape == (rows,) and not labels.is_floating_point():
            columns["label"] = labels
        if tokens is not None and tokens.dim() == 2 and not _has_decoder_beside(self._trainer.model):
            columns["token"] = tokens
            if self._text is not None:
                samples = columns.get(SAMPLE)
                named = isinstance(samples, list) and len(samples) == rows and not isinstance(samples[0], list)
                titles = [f"sample {sample}" for sample in samples] if named and samples else ["training data"] * rows
                columns["place"] = self._text.places(
                    tokens, tensors.get("attention_mask"), titles, gather=self.recorder.world.gather
                )
            if self._position_ids and "position_ids" not in inputs:
                inputs["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).repeat(rows, 1)
        if self._annotate is not None:
            columns |= self._annotate(inputs)
        if columns:
            self.recorder.annotate(**columns)

    def _by_row(self, carried: CarriedColumns, rows: int, tokens: Tensor | None) -> dict[str, Any]:
        """Return the carried columns as the batch has its samples: a row each, two rows each, or all in one row."""
        if rows == len(carried):
            return dict(carried.columns)
        if rows == 2 * len(carried) and _compares_pairs(self._trainer):
            twice = {name: column + column for name, column in carried.columns.items()}
            return {**twice, "chosen": [True] * len(carried) + [False] * len(carried)}
        if tokens is not None and tuple(tokens.shape) == (1, sum(carried.lengths)):
            lengths = torch.tensor(carried.lengths)
            owner = torch.arange(len(carried)).repeat_interleave(lengths).tolist()  # the sample of each position
            return {name: [[column[sample] for sample in owner]] for name, column in carried.columns.items()}
        raise AnnotationError(
            f"The data collator made {rows} rows of {len(carried)} samples, so that no row's sample is known. Use a "
            "collator with one row per sample, or record with dualform.record(trainer.model, "
            "trainer.create_optimizer(), path), without columns."
        )

    def _miss_columns(self) -> None:
        """Say that batches carry no columns, though the training data does."""
        text = (
            "The trainer's batches carry no columns: its own get_train_dataloader or collator leaves them out. Give "
            "annotate=..., a function from a batch to its columns."
        )
        if self._columns:
            raise AnnotationError(text)
        if not self._told and self._annotate is None:
            self._told = True
            warn_user(text)

    # The text -----------------------------------------------------------------------------------------------------

    def _keeps_text(self, model: Any) -> bool:
        tokenizer = getattr(self._trainer, "processing_class", None)
        possible = all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
        possible = possible and not _has_decoder_beside(model)
        if self._wants_text and not possible:
            raise TypeError(
                f"text=True needs a tokenizer and a model without a decoder beside its encoder; the trainer's "
                f"processing_class is a {type(tokenizer).__name__}. Give the tokenizer to the Trainer: "
                "Trainer(processing_class=tokenizer, ...)."
            )
        return possible if self._wants_text is None else self._wants_text

    def _keep_text(self) -> None:
        if self._text is not None and len(self._text) and self.recorder is not None:
            corpus = self._text.corpus(self._trainer.processing_class)
            documents = list(zip(corpus.starts.tolist(), corpus.titles, strict=True))
            self.recorder.media(
                tokens=corpus.train, vocabulary=corpus.vocabulary, documents=documents, unit=corpus.unit
            )


class _RecordingCallback(TrainerCallback):
    """Tells a recording when the training begins, after any checkpoint was loaded, when one is saved, and its end."""

    def __init__(self, recording: TrainerRecording) -> None:
        self._recording = recording

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the recorder."""
        self._recording.start(kwargs["model"], kwargs["optimizer"], step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the trackers."""
        self._recording.stepped()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish what was recorded."""
        self._recording.saved()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the recorder."""
        self._recording.close(None)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, and put it back as it was at the end: on the object itself, or on its class."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _sampler_of(trainer: Any, data: Any) -> Callable[..., Any]:
    """Return a function that makes the trainer's sampler for its own data set, whatever data set it is given.

    A sampler may look at the type and the columns of a data set. It gets those that it would have without a recording:
    a trainer removes unused columns from a data set of Hugging Face before it makes the sampler.
    """
    make = trainer._get_train_sampler

    def make_sampler(*args: Any, **kwargs: Any) -> Any:
        removes = hasattr(data, "remove_columns") and not isinstance(data, IterableDataset)
        return make(trainer._remove_unused_columns(data) if removes else data)

    return make_sampler


def _uncompiled(model: Any) -> Any:
    """Return the module that torch.compile wraps; any other model as it is."""
    return getattr(model, "_orig_mod", model)


def _has_decoder_beside(model: Any) -> bool:
    """Say whether a model has an encoder and a decoder, whose positions are of two texts."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _compares_pairs(trainer: Any) -> bool:
    """Say whether a trainer of trl puts a chosen and a rejected answer of each sample into a batch, chosen first."""
    return any(base.__name__ in ("DPOTrainer", "RewardTrainer") for base in type(trainer).__mro__)


def _layers_seen(model: Any) -> Sequence[str] | None:
    """Return the names of the trained layers where a trainer of trl computes with one's weight itself; else None.

    Such a trainer takes the weight of the output layer and never calls that layer, so it has no patterns. It is left
    out, with every layer that shares its weight, and the recorder says that their parameters are not recorded.
    """
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = vars(plain).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None or "fused_lm_head" not in code.co_varnames:
        return None
    head = plain.get_output_embeddings()
    unseen = {id(parameter) for parameter in head.parameters() if parameter.requires_grad}
    if not unseen:
        return None
    own = {name: list(found.module.parameters()) for name, found in find_candidates(model).items()}
    return [
        name
        for name, parameters in own.items()
        if any(one.requires_grad for one in parameters) and not any(id(one) in unseen for one in parameters)
    ]


def _earlier_text(path: str | os.PathLike[str]) -> dualform.Corpus | None:
    """Return the text that a run keeps, if it keeps one."""
    memory = dualform.open(path)
    return memory.corpus() if "place" in memory.columns else None
