"""The stages of a draft's training. Each resumes if it is cut, and returns at once if its result is
there."""

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
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.weights import load_model, save_model
from sglang_dflash.tools.bench.datasets import Prompt

from . import draft, measure, states, text
from .decoding import fast_decoding
from .device import fastest_dtype, memory, name_of
from .loop import Length, Run, until_sigterm
from .start import dflash2_config, draft_config, init_from_draft, init_from_target
from .writers import ServerWriter, TransformersWriter

# Of the v1 draft, and of the DFlash2 draft, which starts from it: a lower rate, and a higher one
# for tables that begin at zero.
LR, LR2, CODEBOOKS = 5e-3, 1e-3, 2.0
# Prompts of a held-out set that are measured at a milestone, and tokens of an answer to one.
HELD_OUT, HELD_OUT_TOKENS = 32, 128
# Tokens back that the draft sees in training, and when it is served: farther ones would be noise.
CONTEXT = 512
# Of a GPU's memory, states get so large a share at most.
SHARE_OF_STATES = 0.6


@dataclass
class Recipe:
    """Settings and state that all stages share.

    Attributes:
        work: folder of the state.
        target_folder, prompts, device, start: see `launch/train_draft.py`.
        held_out: set name -> its prompts.
        dtype: of all forwards; by default the fastest of the device.
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
    held: bool | None = None
    max_state_bytes: float | None = None
    _shards: dict[str, states.States] = field(default_factory=dict)
    _is_full: bool = False

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self._check_target()
        if self.held is None:
            self.held = self.device.type != "cpu"
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
        """Raises ValueError: the state is that of another target."""
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
        if self.held:
            print("states: none on disk; the draft's stage computes them", flush=True)
            return
        states.write_states(self.target, self.layers, self.work / "text", self.work / "states")

    def held_out_states(self) -> dict[str, states.States]:
        """Return the states of the target's greedy answers to held-out prompts, computed once."""
        folder, found = self.work / "held_out", {}
        folder.mkdir(exist_ok=True)
        writer = TransformersWriter(self.target)
        author = text.Author(writer, self.tokenizer, self.ends, loop_tokens=10**6)
        for name, prompts in self.held_out.items():
            file = folder / f"{name}.pt"
            if not file.exists():
                some = prompts[:: -(-len(prompts) // HELD_OUT)]
                chats = [text.Chat(name, False, list(prompt.turns)) for prompt in some]
                author.answer(chats, HELD_OUT_TOKENS)
                rows = [chat.row for chat in chats if chat.answers]
                made = states.states_of(self.target, self.layers, rows)
                torch.save(vars(made.to(torch.device("cpu"))), file.with_suffix(".tmp"))
                file.with_suffix(".tmp").replace(file)
            found[name] = states.read_states(file).to(self.device)
        return found

    def shards(self) -> list[states.States]:
        """Those of all text that is written by now, on the device."""
        if self.held:
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
            return self._started()
        torch.manual_seed(1)
        model = DraftModel(DraftConfig.from_dict(self.raw))
        sample = states.read_text(sorted((self.work / "text").glob("*.jsonl"))[0])[0]["ids"]
        if not init_from_target(model, self.target, torch.tensor([sample])):
            print("draft: the target's layers are others than a draft's; random weights")
        return model

    def _started(self) -> DraftModel:
        """A draft that was trained before, to go on with.

        Raises:
            ValueError: it is not one that this recipe makes for this target.
        """
        found = json.loads((self.start / "config.json").read_text())
        differ = sorted(key for key in self.raw if found.get(key) != self.raw[key])
        if differ:
            raise ValueError(f"{self.start}: its config.json has another {', '.join(differ)}")
        model = DraftModel(DraftConfig.from_dict(self.raw))
        # A loaded one is frozen.
        model.load_state_dict(load_model(self.start, dtype=torch.float32).state_dict())
        return model

    def curve_before(self) -> list[dict[str, Any]]:
        """The learning curve of the draft that the first one goes on from."""
        file = self.start and self.start / "curve.json"
        return json.loads(file.read_text()) if file and file.exists() else []

    def new_dflash2(self) -> tuple[dict[str, Any], DraftModel]:
        raw = dflash2_config(self.raw)
        torch.manual_seed(2)
        model = DraftModel(DraftConfig.from_dict(raw))
        first = DraftModel(DraftConfig.from_dict(self.raw))
        state = torch.load(self.work / "draft.state.pt", mmap=True, map_location="cpu")
        first.load_state_dict(state["average"])
        init_from_draft(model, first)
        return raw, model

    def train(self, second: bool, length: Length, every: float) -> None:
        """Train, with a milestone every so many seconds.

        Raises:
            SystemExit: the process was asked to end (SIGTERM); the state is saved.
        """
        raw, model = self.new_dflash2() if second else (self.raw, self.new_draft())
        batch_size = draft.BATCH[self.device.type]
        # Not `model.to`: a rotation's frequencies stay float32, as when the draft is served.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.device, self.dtype)
        model.rotary.to(self.device)

        def loss_of(rng: random.Random) -> tuple[Tensor, Tensor]:
            batch = draft.draw(shards, batch_size, draft.ANCHORS, rng)
            return draft.block_loss(model, self.embed, self.head, of, batch, rng)

        run = Run(
            "dflash2" if second else "draft",
            model,
            loss_of,
            lr=LR2 if second else LR,
            work=self.work,
            codebooks=CODEBOOKS,
        )
        shards = self.shards()
        with until_sigterm(run):
            while not run.is_over(length) or not self.is_measured(run):
                # More text may have been written.
                shards = self.shards()
                of = draft.Vocabulary(self.head.shape[0], shards)
                in_batches = run.train(length, until=(run.spent // every + 1) * every)
                self.milestone(run, raw, in_batches, len(shards))

    def is_measured(self, run: Run) -> bool:
        """Return whether the learning curve has the step that a run is at."""
        file = self.work / f"{run.name}.curve.json"
        before = self.curve_before() if run.name == "draft" else []
        step = (before[-1]["step"] if before else 0) + run.step
        return file.exists() and any(row["step"] == step for row in json.loads(file.read_text()))

    def milestone(self, run: Run, raw: dict[str, Any], in_batches: float, shards: int) -> None:
        """Keep the averaged weights, and measure them."""
        model = DraftModel(DraftConfig.from_dict(raw))
        model.load_state_dict(run.average)
        folder = self.work / "milestones" / f"{run.name}-{run.step:06}"
        save_model(model, raw, folder, torch.bfloat16)
        before = self.curve_before() if run.name == "draft" else []
        last = before[-1] if before else dict.fromkeys(("step", "seconds", "blocks"), 0)
        row = {
            "step": last["step"] + run.step,
            "device": name_of(self.device),
            "seconds": last["seconds"] + round(run.spent),
            "blocks": last["blocks"] + run.step * draft.BATCH[self.device.type] * draft.ANCHORS,
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
        """Acceptance length of a draft on every held-out set."""
        model = load_model(folder, dtype=self.dtype, device=self.device)
        found: dict[str, float] = {}
        for of in self.held_out_states().values():
            found |= measure.acceptance(model, self.embed, self.head, of)
        return {name: round(value, 3) for name, value in found.items()}
