"""Tiny random models of Hugging Face and their training data: 2 layers, width 16, texts of 8 tokens out of 24."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install -c constraints.txt '.[transformers]'")

VOCABULARY, LENGTH, SAMPLES = 24, 8, 16
SOURCES = ("books", "news")


def gpt2() -> Any:
    """Return a language model with tables of tokens and positions, and tied weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, **sizes))


def llama() -> Any:
    """Return a language model with grouped queries and RMS norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes() | {"num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, **sizes))


def bert() -> Any:
    """Return a classifier of texts."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **_sizes()))


def vit() -> Any:
    """Return a classifier of images."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in _sizes().items() if name != "max_position_embeddings"}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes))


def t5() -> Any:
    """Return a model with an encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def _sizes() -> dict[str, int]:
    return {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }


def texts(model: str) -> list[dict[str, Any]]:
    """Return the training data of a model: its inputs, and `source`, a column that no model takes."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for place in range(SAMPLES):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
        inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        if model == "bert":
            inputs = {"input_ids": tokens, "labels": tokens[0] % 2}
        elif model == "vit":
            inputs = {"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": place % 2}
        elif model == "t5":
            inputs = {"input_ids": tokens, "labels": tokens[:5]}
        items.append({**inputs, "source": SOURCES[place % 2]})
    return items


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "t5": t5}


def make_trainer(name: str, folder: Path, *, change: Callable[[Any], Any] | None = None, **given: Any) -> Any:
    """Return a trainer of a tiny model for 4 steps of 4 samples; `given` are of `TrainingArguments`, or of `Trainer`.

    Args:
        name: of the model.
        folder: where the trainer puts its checkpoints.
        change: makes another model of the model, for example one with adapters.
        given: what differs from the defaults.
    """
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = MODELS[name]()
    model = model if change is None else change(model)
    of_trainer = {"train_dataset": texts(name)} | {
        key: given.pop(key)
        for key in list(given)
        if key in ("train_dataset", "eval_dataset", "processing_class", "callbacks", "data_collator")
    }
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "seed": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
    }
    trainer = Trainer(model=model, args=TrainingArguments(str(folder), **{**settings, **given}), **of_trainer)
    trainer.pop_callback(transformers.PrinterCallback)  # which prints what disable_tqdm keeps off the screen
    return trainer


def make_tokenizer() -> Any:
    """Return a tokenizer of 24 words, w3 to w23 among them, whose padding is token 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
