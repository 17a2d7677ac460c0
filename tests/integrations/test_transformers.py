"""Trainings by transformers' Trainer, recorded: exact, equal to the bit, every sample and column found, no trace."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import dualform
from dualform.errors import AnnotationError, RefusedError
from helpers.hugging_face import (
    LENGTH,
    SAMPLES,
    SOURCES,
    make_tokenizer,
    make_trainer,
    texts,
    transformers,
)
from helpers.together import run_together

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

POSITIONS = r"Columns per row are left out \(null\) in layers? "
UNCOVERED = "trained parameters? .* (is|are) not recorded"
EXPECTED = {
    "gpt2": (POSITIONS,),
    "bert": (POSITIONS, "column 'token' has shape"),
    "vit": (UNCOVERED,),
    "t5": (POSITIONS,),
}
"""What a recording of each model warns of: tables that are looked up once for all rows, parameters without a layer."""

Train = Callable[[Any], Any]


def train(trainer: Any) -> None:
    trainer.train()


def recorded(trainer: Any, run: Path, *, expect: Sequence[str] = (), act: Train = train, **options: Any) -> Any:
    """Train and record; the warnings must be the expected ones. Return the recording."""
    from dualform.integrations.transformers import record

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with record(trainer, run, **options) as recording:
            act(trainer)
    told = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    told = [text for text in told if "lr_scheduler.step" not in text]
    assert len(told) == len(expect), told
    assert all(re.search(pattern, text) for pattern, text in zip(expect, told, strict=True)), told
    return recording


def assert_equal_weights(first: nn.Module, second: nn.Module) -> None:
    """Compare all parameters and buffers to the bit."""
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def assert_untouched(trainer: Any, before: dict[str, Any]) -> None:
    """Compare a trainer and its model with what they had before: no hook, callback or attribute of ours is left."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in trainer.model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    assert [hook for hook in hooks if type(hook).__module__.startswith("dualform")] == []
    assert [hook for hook in hooks if getattr(hook, "__module__", "").startswith("dualform")] == []
    for name, value in before.items():
        assert vars(trainer).get(name) is value, name
    assert [type(one).__name__ for one in trainer.callback_handler.callbacks if "Record" in type(one).__name__] == []
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def attributes(trainer: Any) -> dict[str, Any]:
    """Return the attributes that a recording replaces, as they are; None where the trainer's class has them."""
    names = ("train_dataset", "data_collator", "training_step", "_get_train_sampler", "_load_best_model")
    return {name: vars(trainer).get(name) for name in names}


def samples_by_layer(memory: dualform.Memory) -> dict[str, set[tuple[Any, Any]]]:
    """Return the pairs of sample and source that each layer with patterns of samples has."""
    found = {}
    for name in memory.layers:
        table = memory.patterns(name, columns=["sample", "source"])
        pairs = set(zip(table["sample"].to_pylist(), table["source"].to_pylist(), strict=True))
        if table.num_rows and pairs != {(None, None)}:
            found[name] = pairs
    return found


def assert_recorded(memory: dualform.Memory, model: nn.Module, samples: int = SAMPLES) -> None:
    """Verify a run against its model, and find every sample with its own source in every layer that has rows."""
    checked = memory.verify(model)
    print(checked)
    assert checked.passed
    found = samples_by_layer(memory)
    assert found
    for pairs in found.values():
        assert pairs == {(sample, SOURCES[sample % 2]) for sample in range(samples)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_a_model_of_each_structure(name: str, tmp_path: Path) -> None:
    plain = make_trainer(name, tmp_path)
    plain.train()
    trainer = make_trainer(name, tmp_path)
    before = attributes(trainer)
    recorded(trainer, tmp_path / "run", columns=["source"], expect=EXPECTED.get(name, ()))
    assert_equal_weights(plain.model, trainer.model)
    assert_untouched(trainer, before)
    memory = dualform.open(tmp_path / "run")
    assert_recorded(memory, trainer.model)
    assert ("token" in memory.columns) == (name in ("gpt2", "llama", "bert"))
    assert ("label" in memory.columns) == (name in ("bert", "vit"))


OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"optim": "adamw_torch_fused"},
    "accumulation, clipping, warm-up": {
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "max_grad_norm": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
    },
    "bfloat16": {"bf16": True},
    "checkpointing, groups of equal length": {
        "gradient_checkpointing": True,
        "train_sampling_strategy": "group_by_length",
    },
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": texts("llama")[:4]},
    "all columns, a worker": {"remove_unused_columns": False, "dataloader_num_workers": 1},
}


TRAINED = {"fused": "gpt2", "accumulation, clipping, warm-up": "bert", "bfloat16": "vit"}
"""The models of some ways of training; of the others it is Llama's structure."""


def inputs_alone(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch of the model's inputs alone, as a user must who keeps all columns."""
    return transformers.default_data_collator(
        [{name: item[name] for name in ("input_ids", "labels")} for item in items]
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_a_way_of_training(option: str, tmp_path: Path) -> None:
    given = {**OPTIONS[option], **({"data_collator": inputs_alone} if option == "all columns, a worker" else {})}
    name = TRAINED.get(option, "llama")
    plain = make_trainer(name, tmp_path, **given)
    plain.train()
    trainer = make_trainer(name, tmp_path, **given)
    before = attributes(trainer)
    recorded(trainer, tmp_path / "run", columns=["source"], expect=EXPECTED.get(name, ()))
    assert_equal_weights(plain.model, trainer.model)
    assert_untouched(trainer, before)
    assert_recorded(dualform.open(tmp_path / "run"), trainer.model)


@pytest.mark.slow  # importing and running the compiler takes eight seconds; hooks under it have fast tests elsewhere
def test_a_compiled_model(tmp_path: Path) -> None:
    trainer = make_trainer("llama", tmp_path, torch_compile=True, torch_compile_backend="eager")
    before = attributes(trainer)
    layers = ["model.layers.*.mlp.down_proj", "lm_head"]  # each of which breaks the graph
    recorded(trainer, tmp_path / "run", columns=["source"], layers=layers, expect=[UNCOVERED])
    assert_untouched(trainer, before)
    assert_recorded(dualform.open(tmp_path / "run"), trainer.model)


class Stream(IterableDataset[Any]):
    """The training data as a stream."""

    def __iter__(self) -> Iterator[Any]:
        yield from texts("llama")


def test_two_processes_record_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process trains on samples of its own, 2 + 2 a step; all is found in one run, and equal to the bit."""
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "ddp_find_unused_parameters": False}

    def work(rank: int) -> tuple[int, list[int]]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        told: list[int] = []
        plain = make_trainer("llama", tmp_path, processing_class=tokenizer, **settings)
        plain.train()
        trainer = make_trainer("llama", tmp_path, processing_class=tokenizer, **settings)
        before = attributes(trainer)
        track = lambda step, numbers: told.append(step)  # noqa: E731
        recorded(trainer, tmp_path / "run", columns=["source"], trackers=track)
        assert_equal_weights(plain.model, trainer.model)
        assert_untouched(trainer, before)
        assert_recorded(dualform.open(tmp_path / "run"), trainer.model)
        stream = make_trainer("llama", tmp_path, train_dataset=Stream(), **settings)
        with pytest.raises(RefusedError, match="dispatch_batches"):
            recorded(stream, tmp_path / "stream", columns=["source"])
        own: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
        stream = make_trainer("llama", tmp_path, train_dataset=Stream(), **settings, **own)
        recorded(stream, tmp_path / "stream", columns=["source"], layers=["lm_head"], expect=[UNCOVERED])
        return trainer.accelerator.num_processes, told

    assert run_together(tmp_path, work) == [(2, [1, 2, 3, 4, 4]), (2, [])]
    memory = dualform.open(tmp_path / "run")
    table = memory.patterns("lm_head")
    ranks: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, sample in zip(table["rank"].to_pylist(), table["sample"].to_pylist(), strict=True):
        ranks[rank].add(sample)
    assert (len(ranks[0]), len(ranks[1]), ranks[0] & ranks[1]) == (SAMPLES // 2, SAMPLES // 2, set())
    corpus = memory.corpus()
    assert len(corpus.train) == SAMPLES * LENGTH
    assert corpus.train[table["place"].to_numpy()].tolist() == table["token"].to_pylist()
    assert sorted(corpus.titles) == sorted(f"sample {sample}" for sample in range(SAMPLES))
    assert set(dualform.open(tmp_path / "stream").patterns("lm_head")["source"].to_pylist()) == set(SOURCES)


def test_processes_under_an_unknown_wrapper_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dualform.integrations.transformers import record

    trainer = make_trainer("llama", tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    trainer.model_wrapped = nn.Sequential(trainer.model)
    with pytest.raises(RefusedError, match="in a Sequential"), record(trainer, tmp_path / "run") as recording:
        recording.start(trainer.model, trainer.create_optimizer(), step=0)


def test_positions_given_by_row_belong_to_samples(tmp_path: Path) -> None:
    trainer = make_trainer("gpt2", tmp_path)
    recorded(trainer, tmp_path / "run", columns=["source"], position_ids=True)
    memory = dualform.open(tmp_path / "run")
    assert_recorded(memory, trainer.model)
    assert set(samples_by_layer(memory)) == set(memory.layers)


def test_a_training_that_is_resumed(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    plain = make_trainer("llama", tmp_path / "plain", processing_class=tokenizer)
    plain.train()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "processing_class": tokenizer}
    trainer = make_trainer("llama", tmp_path, callbacks=[StopAfter(3)], **options)
    with pytest.raises(Stopped):
        recorded(trainer, tmp_path / "run", columns=["source"])
    trainer = make_trainer("llama", tmp_path, **options)
    recorded(trainer, tmp_path / "run", columns=["source"], act=lambda one: one.train(resume_from_checkpoint=True))
    assert_equal_weights(plain.model, trainer.model)
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 4
    assert_recorded(memory, trainer.model)
    assert len(memory.corpus().titles) == SAMPLES
    assert memory.attend_text(trainer.model, "w5 w7", tokenizer=tokenizer, layers="lm_head", goes_on=1).notes == ()


class Stopped(Exception):
    """An error of somebody else's callback."""


class StopAfter(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


def test_an_exception_leaves_nothing_on_the_model(tmp_path: Path) -> None:
    trainer = make_trainer("llama", tmp_path, callbacks=[StopAfter(2)])
    before = attributes(trainer)
    with pytest.raises(Stopped):
        recorded(trainer, tmp_path / "run")
    assert_untouched(trainer, before)
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 2
    assert memory.verify(trainer.model).passed
    trainer.remove_callback(StopAfter)
    recorded(trainer, tmp_path / "again")  # the trainer, its model and optimizer can be recorded again
    assert dualform.open(tmp_path / "again").verify(trainer.model).passed


def test_the_best_model_loaded_at_the_end_is_not_the_end_of_the_training(tmp_path: Path) -> None:
    evaluated: dict[str, Any] = {"eval_dataset": texts("llama")[:4], "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(
        "llama",
        tmp_path,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=2,
        greater_is_better=True,  # of the loss, which falls: the best is the first
        **evaluated,
    )
    recorded(trainer, tmp_path / "run", columns=["source"])
    assert trainer.state.best_global_step == 2
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 4
    assert memory.verify().passed
    assert memory.at(step=2).verify(trainer.model).passed


def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="Adafactor"):
        recorded(make_trainer("llama", tmp_path, optim="adafactor"), tmp_path / "run")
    whole = make_trainer("llama", tmp_path, change=lambda model: model.bfloat16())
    with pytest.raises(RefusedError, match="bfloat16"):
        recorded(whole, tmp_path / "run")
    copied = make_trainer("llama", tmp_path)
    copied._wrap_model = lambda model, **options: nn.DataParallel(model)
    with pytest.raises(RefusedError, match="DataParallel is not supported"):
        recorded(copied, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stream_has_columns_and_no_places(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(texts("llama"))

    trainer = make_trainer("llama", tmp_path, train_dataset=Stream())
    recorded(trainer, tmp_path / "run", columns=["source"], annotate=lambda batch: {"first": batch["input_ids"][:, 0]})
    memory = dualform.open(tmp_path / "run")
    assert memory.verify(trainer.model).passed
    assert "sample" not in memory.columns
    table = memory.patterns("lm_head").to_pandas()
    expected = {(item["input_ids"][0], item["source"]) for item in texts("llama")}
    assert {(row["first"], row["source"]) for _, row in table.iterrows()} == expected


def test_a_second_training_in_one_recording_is_refused(tmp_path: Path) -> None:
    def twice(trainer: Any) -> None:
        trainer.train()
        trainer.train()

    with pytest.raises(RefusedError, match="a second time"):
        recorded(make_trainer("llama", tmp_path, max_steps=1), tmp_path / "run", act=twice)


def test_a_recording_without_a_training_says_so(tmp_path: Path) -> None:
    recorded(make_trainer("llama", tmp_path), tmp_path / "run", act=lambda trainer: None, expect=["was not called"])


def test_mistakes_are_named(tmp_path: Path) -> None:
    trainer = make_trainer("llama", tmp_path)
    with pytest.raises(TypeError, match="a LlamaForCausalLM; expected a Trainer"):
        recorded(trainer.model, tmp_path / "run")
    with pytest.raises(AnnotationError, match="columns names 'token'"):
        recorded(trainer, tmp_path / "run", columns=["token"])
    with pytest.raises(AnnotationError, match="no column 'sauce'; there are 'input_ids', 'labels', 'source'"):
        recorded(trainer, tmp_path / "run", columns=["sauce"])
    with pytest.raises(TypeError, match="processing_class is a NoneType"):
        recorded(make_trainer("llama", tmp_path), tmp_path / "other", text=True)


def test_a_collator_that_joins_samples_is_refused(tmp_path: Path) -> None:
    def joined(items: list[dict[str, Any]]) -> dict[str, Any]:
        return transformers.default_data_collator(items[:3])

    with pytest.raises(AnnotationError, match="3 rows of 4 samples"):
        recorded(make_trainer("llama", tmp_path, data_collator=joined), tmp_path / "run")


def test_samples_flattened_into_one_row_keep_their_numbers(tmp_path: Path) -> None:
    trainer = make_trainer("llama", tmp_path, data_collator=transformers.DataCollatorWithFlattening())
    recorded(trainer, tmp_path / "run", columns=["source"])
    memory = dualform.open(tmp_path / "run")
    assert_recorded(memory, trainer.model)
    table = memory.patterns("model.embed_tokens").to_pandas()
    data = texts("llama")
    assert all(row.token in data[row["sample"]]["input_ids"] for _, row in table.iterrows())


def test_adapters_alone_are_recorded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapt(model: Any, **options: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))

    for case, change in {"float32": adapt, "bfloat16": lambda model: adapt(model.bfloat16())}.items():
        plain = make_trainer("llama", tmp_path, change=change)
        plain.train()
        trainer = make_trainer("llama", tmp_path, change=change)
        recorded(trainer, tmp_path / case, columns=["source"])
        assert_equal_weights(plain.model, trainer.model)
        memory = dualform.open(tmp_path / case)
        assert_recorded(memory, trainer.model)
        assert all("lora_" in name for name in memory.layers)
        assert len(memory.layers) == 8
    # DoRA's magnitudes are no layer's, and its adapters also see an identity matrix, whose rows are no samples.
    trainer = make_trainer("llama", tmp_path, change=lambda model: adapt(model, use_dora=True))
    recorded(trainer, tmp_path / "dora", columns=["source"], expect=[UNCOVERED, POSITIONS])
    assert dualform.open(tmp_path / "dora").verify(trainer.model).passed


def test_a_prompt_finds_passages_of_the_training_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    data = [{"input_ids": item["input_ids"][: LENGTH - place % 3]} for place, item in enumerate(texts("llama"))]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = make_trainer(
        "llama", tmp_path, train_dataset=data, data_collator=collator, processing_class=tokenizer, num_train_epochs=2
    )
    recorded(trainer, tmp_path / "run")
    memory = dualform.open(tmp_path / "run")
    corpus = memory.corpus()
    kept = {corpus.titles[i]: corpus.train[a:b].tolist() for i, (a, b) in enumerate(
        zip(corpus.starts, [*corpus.starts[1:], len(corpus.train)], strict=True)
    )}  # fmt: skip
    assert kept == {"padding": [2], **{f"sample {place}": item["input_ids"] for place, item in enumerate(data)}}
    answer = memory.attend_text(trainer.model, "w5 w7 w9", tokenizer=tokenizer, goes_on=2)
    assert answer.layers.keys() == memory.layers.keys()
    assert answer["lm_head"].by_pattern[0].document.startswith("sample ")
    assert len(answer.next) == 5
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    messages = [{"role": "user", "content": "w5 w7"}, {"role": "assistant", "content": "w9"}]
    asked = memory.attend_text(trainer.model, messages, tokenizer=tokenizer, goes_on=2)
    assert [guess.probability for guess in asked.next] == [guess.probability for guess in answer.next]


def test_data_sets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    # By the column "length", which is not the length, the samples are grouped in another order than by their tokens.
    data = datasets.Dataset.from_list([{**item, "length": 7 * i % 16} for i, item in enumerate(texts("llama"))])
    transformed = data.with_transform(lambda batch: {name: batch[name] for name in ("input_ids", "labels")})
    cases: dict[str, dict[str, Any]] = {
        "grouped by tokens": {"train_dataset": data, "train_sampling_strategy": "group_by_length"},
        "grouped by a column": {
            "train_dataset": data,
            "train_sampling_strategy": "group_by_length",
            "remove_unused_columns": False,
            "data_collator": inputs_alone,
        },
        "transformed": {"train_dataset": transformed, "remove_unused_columns": False},
    }
    for case, given in cases.items():
        plain = make_trainer("llama", tmp_path, **given)
        plain.train()
        trainer = make_trainer("llama", tmp_path, **given)
        recorded(trainer, tmp_path / case, columns=["source"])
        assert_equal_weights(plain.model, trainer.model)
        assert_recorded(dualform.open(tmp_path / case), trainer.model)


def test_trainers_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from helpers.hugging_face import llama

    words = [" ".join(f"w{token}" for token in item["input_ids"]) for item in texts("llama")]
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
    }
    sources = [SOURCES[place % 2] for place in range(SAMPLES)]
    texts_alone = datasets.Dataset.from_dict({"text": words, "source": sources})
    pairs = datasets.Dataset.from_dict(
        {"prompt": words, "chosen": words[1:] + words[:1], "rejected": words[2:] + words[:2], "source": sources}
    )
    for case, make, config, data in (
        ("sft", trl.SFTTrainer, trl.SFTConfig, texts_alone),
        ("dpo", trl.DPOTrainer, trl.DPOConfig, pairs),
    ):
        torch.manual_seed(0)
        trainer = make(
            model=llama(),
            **({"ref_model": llama()} if case == "dpo" else {}),
            args=config(str(tmp_path), **settings),
            train_dataset=data,
            processing_class=make_tokenizer(),
        )
        # trl multiplies by the weight of lm_head itself, and never calls that layer.
        recorded(
            trainer, tmp_path / case, columns=["source"], expect=["lm_head.weight.* not recorded|not recorded.*lm_head"]
        )
        memory = dualform.open(tmp_path / case)
        assert_recorded(memory, trainer.model)
        assert "lm_head" not in memory.layers
        table = memory.patterns("model.embed_tokens")
        rows = zip(*(table[name].to_pylist() for name in ("sample", "position", "token")), strict=True)
        data_texts = [item["input_ids"] for item in texts("llama")]
        assert all(data_texts[sample][place] == token for sample, place, token in rows if place < LENGTH - 1)
        assert ("chosen" in memory.columns) == (case == "dpo")


def test_numbers_go_to_trackers(tmp_path: Path) -> None:
    told: list[tuple[int, dict[str, float]]] = []
    trainer = make_trainer("llama", tmp_path)
    recorded(trainer, tmp_path / "run", trackers=lambda step, numbers: told.append((step, dict(numbers))))
    assert [step for step, _ in told] == [1, 2, 3, 4, 4]
    written = [numbers["dualform/bytes"] for _, numbers in told[:-1]]
    assert written == sorted(written)
    assert told[-1][1]["dualform/passed"] == 1
    assert 0 < told[-1][1]["dualform/error"] < told[-1][1]["dualform/error_bound"]


def test_shares_by_a_column_instead_of_patterns(tmp_path: Path) -> None:
    trainer = make_trainer("llama", tmp_path)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    recorded(trainer, tmp_path / "run", columns=["source"], keep=dualform.Shares(by="source"))
    memory = dualform.open(tmp_path / "run")
    assert memory.verify(trainer.model).passed
    both = [memory.where(source=source).shares()["lm_head.weight"] for source in SOURCES]
    change = trainer.model.state_dict()["lm_head.weight"] - start["lm_head.weight"]
    torch.testing.assert_close(sum(both), change, rtol=1e-3, atol=1e-5)
