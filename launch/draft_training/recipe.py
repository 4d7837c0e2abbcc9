"""The stages of a draft's training. A stage resumes if it was interrupted, and returns at once if
its result exists."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.tools.bench.datasets import Prompt

from . import draft, measure, states, text
from .decoding import fast_decoding
from .device import fastest_dtype, memory, name_of
from .loop import TrainingLimit, TrainingRun, until_sigterm
from .start import dflash2_config, draft_config, init_from_draft, init_from_target
from .writers import ServerWriter, TransformersWriter

# Learning rates of the v1 draft, and of the DFlash2 draft, which starts from it and needs a lower
# one; the factor on the latter for the selector's tables, which begin at zero.
LR, LR2, CODEBOOKS = 5e-3, 1e-3, 2.0
# Prompts of a held-out set that are measured at a milestone, and tokens of an answer to one.
HELD_OUT, HELD_OUT_TOKENS = 32, 128
# The draft's window in training and in serving: tokens farther back would be noise to it.
CONTEXT = 512
# The largest share of a GPU's memory for states.
SHARE_OF_STATES = 0.6


@dataclass
class Recipe:
    """Settings and state that all stages share.

    Attributes:
        work: folder of the state.
        target_folder, prompts, device, start: see `launch/train_draft.py`.
        held_out: set name -> its prompts.
        dtype: dtype of all forwards; by default the fastest one of the device.
        held: the states of the text are computed where they are used, and kept in memory, by
            default on a GPU; otherwise they are files.
        max_state_bytes: of held ones; by default 60 % of the device's memory.
    """

    target_folder: Path
    work: Path
    prompts: Sequence[Prompt]
    held_out: Mapping[str, Sequence[Prompt]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    start: Path | None = None
    states_in_memory: bool | None = None
    max_state_bytes: float | None = None
    _shards: dict[str, states.States] = field(default_factory=dict)
    _is_full: bool = False

    def __post_init__(self) -> None:
        if not (self.target_folder / "config.json").is_file():
            raise ConfigError("target", str(self.target_folder), "a folder with a chat model")
        self.work.mkdir(parents=True, exist_ok=True)
        self._check_target()
        if self.states_in_memory is None:
            self.states_in_memory = self.device.type != "cpu"
        self.dtype = self.dtype or fastest_dtype(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(self.target_folder)
        model = AutoModelForCausalLM.from_pretrained(self.target_folder, dtype=self.dtype)
        model = model.to(self.device).eval().requires_grad_(False)
        self.target: PreTrainedModel = fast_decoding(model)
        self.raw = draft_config(self.target, self.tokenizer, CONTEXT)
        self.layers = self.raw["dflash_config"]["target_layer_ids"]
        named = self.target.generation_config.eos_token_id
        listed = named if isinstance(named, list) else [named]
        self.ends = {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}

    def _check_target(self) -> None:
        """Raise ValueError if the state in `work` is another target's."""
        digest = hashlib.sha256()
        for file in sorted(self.target_folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
        file = self.work / "target.sha256"
        if not file.exists():
            file.write_text(digest.hexdigest())
        if file.read_text() != digest.hexdigest():
            raise ValueError(
                f"{self.work}: the state of another target than {self.target_folder}; delete the "
                "folder, or give another --work"
            )

    @property
    def head(self) -> Tensor:
        return self.target.get_output_embeddings().weight.detach()

    @property
    def embed(self) -> Tensor:
        return self.target.get_input_embeddings().weight.detach()

    def write_text(self, shards: int, chats: int, servers: Sequence[str] = ()) -> None:
        """`servers`: URLs of SGLang servers of the target, which write in place of this process."""
        every = [prompt for prompts in self.held_out.values() for prompt in prompts]
        writer = ServerWriter(servers) if servers else TransformersWriter(self.target)
        author = text.Author(writer, self.tokenizer, self.ends, every)
        text.write_shards(author, self.work / "text", shards, chats, self.prompts)

    def write_states(self) -> None:
        if self.states_in_memory:
            print("states: none on disk; the draft's stage computes them", flush=True)
            return
        states.write_states(self.target, self.layers, self.work / "text", self.work / "states")

    def held_out_states(self) -> dict[str, states.States]:
        """Return the states of the target's greedy answers to held-out prompts, computed once."""
        folder, by_set = self.work / "held_out", {}
        folder.mkdir(exist_ok=True)
        writer = TransformersWriter(self.target)
        author = text.Author(writer, self.tokenizer, self.ends, loop_tokens=10**6)
        for name, prompts in self.held_out.items():
            file = folder / f"{name}.pt"
            if not file.exists():
                spread_prompts = prompts[:: -(-len(prompts) // HELD_OUT)]
                chats = [text.Chat(name, False, list(prompt.turns)) for prompt in spread_prompts]
                author.answer(chats, HELD_OUT_TOKENS)
                rows = [chat.row for chat in chats if chat.answers]
                computed = states.states_of(self.target, self.layers, rows)
                torch.save(vars(computed.to(torch.device("cpu"))), file.with_suffix(".tmp"))
                file.with_suffix(".tmp").replace(file)
            by_set[name] = states.read_states(file).to(self.device)
        return by_set

    def shards(self) -> list[states.States]:
        """Return the states of all text that has been written, on the device."""
        if self.states_in_memory:
            if not self._is_full:
                limit = self.max_state_bytes or SHARE_OF_STATES * memory(self.device)
                self._is_full = not states.hold_states(
                    self.target,
                    self.layers,
                    self.work / "text",
                    self.work / "states",
                    self._shards,
                    limit,
                )
            return list(self._shards.values())
        self.write_states()
        for file in sorted((self.work / "states").glob("*.pt")):
            if file.name not in self._shards:
                self._shards[file.name] = states.read_states(file).to(self.device)
        return list(self._shards.values())

    def new_draft(self) -> DraftModel:
        if self.start is not None:
            return self._load_start()
        torch.manual_seed(1)
        model = DraftModel(DraftConfig.from_dict(self.raw))
        sample = states.read_text(sorted((self.work / "text").glob("*.jsonl"))[0])[0]["ids"]
        if not init_from_target(model, self.target, torch.tensor([sample])):
            print("draft: the target's layers are others than a draft's; random weights")
        return model

    def _load_start(self) -> DraftModel:
        """Load the draft of an earlier training to continue with.

        Raises:
            ValueError: this recipe does not make such a draft for this target.
        """
        saved_config = json.loads((self.start / "config.json").read_text())
        differ = sorted(key for key in self.raw if saved_config.get(key) != self.raw[key])
        if differ:
            raise ValueError(f"{self.start}: its config.json has another {', '.join(differ)}")
        model = DraftModel(DraftConfig.from_dict(self.raw))
        # `load_model` returns a frozen model.
        model.load_state_dict(load_model(self.start, dtype=torch.float32).state_dict())
        return model

    def curve_before(self) -> list[dict[str, Any]]:
        """Return the learning curve of the draft that the training continues; empty without one."""
        file = self.start and self.start / "curve.json"
        return json.loads(file.read_text()) if file and file.exists() else []

    def new_dflash2(self) -> tuple[dict[str, Any], DraftModel]:
        raw = dflash2_config(self.raw)
        torch.manual_seed(2)
        model = DraftModel(DraftConfig.from_dict(raw))
        v1_draft = DraftModel(DraftConfig.from_dict(self.raw))
        state = torch.load(self.work / "draft.state.pt", mmap=True, map_location="cpu")
        v1_draft.load_state_dict(state["average"])
        init_from_draft(model, v1_draft)
        return raw, model

    def train(self, is_dflash2: bool, length: TrainingLimit, every: float) -> None:
        """Train a draft, with a milestone every `every` seconds.

        Raises:
            SystemExit: SIGTERM has ended the run; its state is saved.
        """
        needed = self.work / ("draft.state.pt" if is_dflash2 else "text")
        if not needed.exists():
            stage = "draft" if is_dflash2 else "text"
            raise ValueError(f"{needed}: not there yet; run the stage {stage} first")
        raw, model = self.new_dflash2() if is_dflash2 else (self.raw, self.new_draft())
        batch_size = draft.BATCH[self.device.type]
        # `model.to` would also cast the frequencies of RoPE, which stay float32 as in serving.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.device, self.dtype)
        model.rotary.to(self.device)

        def loss_of(rng: random.Random) -> tuple[Tensor, Tensor]:
            batch = draft.draw(shards, batch_size, draft.ANCHORS, rng)
            return draft.block_loss(model, self.embed, self.head, vocabulary, batch, rng)

        run = TrainingRun(
            "dflash2" if is_dflash2 else "draft",
            model,
            loss_of,
            lr=LR2 if is_dflash2 else LR,
            work=self.work,
            codebooks=CODEBOOKS,
        )
        shards = self.shards()
        with until_sigterm(run):
            while not run.is_over(length) or not self.is_measured(run):
                # More text may have been written since.
                shards = self.shards()
                vocabulary = draft.Vocabulary(self.head.shape[0], shards)
                in_batches = run.train(length, until=(run.spent // every + 1) * every)
                self.milestone(run, raw, in_batches, len(shards))

    def is_measured(self, run: TrainingRun) -> bool:
        """Return whether the learning curve has a row for the run's current step."""
        file = self.work / f"{run.name}.curve.json"
        before = self.curve_before() if run.name == "draft" else []
        step = (before[-1]["step"] if before else 0) + run.step
        return file.exists() and any(row["step"] == step for row in json.loads(file.read_text()))

    def milestone(
        self, run: TrainingRun, raw: dict[str, Any], in_batches: float, shards: int
    ) -> None:
        """Save the averaged weights, measure them, and add a row to the learning curve."""
        model = DraftModel(DraftConfig.from_dict(raw))
        model.load_state_dict(run.average)
        folder = self.work / "milestones" / f"{run.name}-{run.step:06}"
        save_model(model, raw, folder, torch.bfloat16)
        before = self.curve_before() if run.name == "draft" else []
        last_row = before[-1] if before else dict.fromkeys(("step", "seconds", "blocks"), 0)
        row = {
            "step": last_row["step"] + run.step,
            "device": name_of(self.device),
            "seconds": last_row["seconds"] + round(run.spent),
            "blocks": last_row["blocks"] + run.step * draft.BATCH[self.device.type] * draft.ANCHORS,
            "shards": shards,
            "in_batches": round(in_batches, 3),
            "held_out": self.measured(folder),
        }
        file = self.work / f"{run.name}.curve.json"
        curve = json.loads(file.read_text()) if file.exists() else before
        curve = [old for old in curve if old["step"] < row["step"]] + [row]
        file.write_text(json.dumps(curve, indent=1) + "\n")
        print(f"milestone {row}", flush=True)

    def measured(self, folder: Path) -> dict[str, float]:
        """Return the acceptance length of a draft on each held-out set."""
        model = load_model(folder, dtype=self.dtype, device=self.device)
        lengths: dict[str, float] = {}
        for held_out in self.held_out_states().values():
            lengths |= measure.acceptance(model, self.embed, self.head, held_out)
        return {name: round(value, 3) for name, value in lengths.items()}
