"""Recipes with Lightning, Accelerate and Transformers: one process for each rank, which trains by itself as far as they
know."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch

from tests.adapters.torch_recipes import Alone, Model, Side, batches, recipe


@pytest.fixture(autouse=True)
def few(hvd: Any) -> None:
    """They take seconds to import."""
    if hvd.size() not in (2, 3):
        pytest.skip("2 and 3 ranks are enough")


def loader_of(side: Side) -> Any:
    """This process's part of each global batch."""
    return torch.utils.data.DataLoader([side.rows(batch) for batch in batches()], batch_size=None)


# ---- Lightning -------------------------------------------------------------------------------------------------------


def lightning(side: Side, model: Model, *, passes: int = 1, clip: float | None = None, manual: bool = False) -> Any:
    """Lightning gets one device; ranks, and what of the data is theirs, are the program's."""
    pytest.importorskip("lightning")
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model
            self.automatic_optimization = not manual

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            wrapped = side.optimizer(optimizer, self, backward_passes_per_step=passes)
            return [wrapped], [torch.optim.lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.5)]

        def training_step(self, batch: Any, number: int) -> Any:
            loss = side.loss(self.network, batch)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=passes,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_of(side))
    assert trainer.world_size == 1 and trainer.global_step == 8 // passes


test_lightning = recipe(views=False)(lightning)
test_lightning_manual = recipe(views=False)(partial(lightning, manual=True))
test_lightning_accumulates_and_clips = recipe(views=False)(partial(lightning, passes=2, clip=0.1))


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerate(side: Side, model: Model, *, passes: int = 1, clip: float | None = None) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=passes)
    assert accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    optimizer = side.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model, backward_passes_per_step=passes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    prepared, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader_of(side))
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(side.loss(prepared, batch))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


test_accelerate = recipe(views=False)(accelerate)
test_accelerate_accumulates_and_clips = recipe(views=False)(partial(accelerate, passes=2, clip=0.1))


# ---- Transformers ----------------------------------------------------------------------------------------------------

SENTENCES, LENGTH, WORDS = 12, 6, 20


def bert() -> Model:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **dropout, intermediate_size=32, num_labels=3)).double()


def gpt() -> Model:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **dropout)
    ).double()


def trainer(side: Side, model: Model, *, language: bool, passes: int = 1, clip: float) -> None:
    """Each rank's dataset has its sentences, in batches of equally many, because the model takes the mean of its
    batch."""
    from transformers import Trainer, TrainingArguments

    source = torch.Generator().manual_seed(3)
    sentences = torch.randint(0, WORDS, (SENTENCES, LENGTH), generator=source)
    labels = sentences if language else torch.randint(0, 3, (SENTENCES,), generator=source)
    rows = [{"input_ids": sentence, "labels": label} for sentence, label in zip(sentences, labels, strict=True)]
    mine = rows if isinstance(side, Alone) else rows[side.rank :: side.size]
    # A scheduler of the program's, because the Trainer's own would be the same.
    optimizer = side.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model, backward_passes_per_step=passes)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            per_device_train_batch_size=len(mine) // passes,
            gradient_accumulation_steps=passes,
            max_grad_norm=clip,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        assert arguments.world_size == 1
        Trainer(model=model, args=arguments, train_dataset=mine, optimizers=(optimizer, scheduler)).train()


test_trainer_clips = recipe(bert, views=False)(partial(trainer, language=False, clip=0.1))
SINGLE = {"rtol": 1e-4, "atol": 1e-6}  # the loss of language models is computed in float32
test_trainer_accumulates = recipe(gpt, SINGLE, views=False)(partial(trainer, language=True, passes=2, clip=0.0))
