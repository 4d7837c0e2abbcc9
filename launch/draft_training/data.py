"""The text of the pair: this Python's standard library, split by file, and its tokenizer.

Neither model sees the held-out files. A training file that shares more than `MOST_SHARED` of its
own passages, or of a held-out file's, with the held-out part is left out of training, so that no
held-out text is known from a near copy.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_dflash.bench import datasets

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, MASK]

# The pattern that the Qwen tokenizers split on: words, single digits, punctuation, newlines,
# spaces.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MEMORIZED = ("textwrap.py", "shlex.py", "fnmatch.py", "glob.py", "queue.py", "sched.py", "copy.py")
# Held out by name. About 1 file in 20 of the others is held out by a hash of its name.
HELD_OUT = [name.replace(".", "/") + ".py" for name in datasets.HELD_OUT]

# A passage is a run of this many lines, without blank lines and indentation.
PASSAGE_LINES = 4
MOST_SHARED = 0.05

_SKIP_PARTS = {
    "test",
    "tests",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "idlelib",
    "turtledemo",
    "site-packages",
    "__pycache__",
}


def load_files() -> tuple[dict[str, str], dict[str, str]]:
    """The standard library of this Python: file name -> text, for training and held out."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = {}, {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if (
            _SKIP_PARTS & set(name.split("/")[:-1])
            or path.stat().st_size < 200
            or name.startswith("_sysconfigdata")
        ):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        by_hash = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        # Memorized by the dense and the hybrid pair, and so never held out.
        if name in HELD_OUT or (by_hash and name not in MEMORIZED):
            held_out[name] = text
        else:
            train[name] = text
    return train, held_out


@dataclass(frozen=True)
class Split:
    """File name -> text. `near_copies`: training files that were left out."""

    train: dict[str, str]
    held_out: dict[str, str]
    near_copies: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 over the names and texts of both parts, in order."""
        parts = [
            sorted((name, hashlib.sha256(text.encode()).hexdigest()) for name, text in part.items())
            for part in (self.train, self.held_out)
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load_split() -> Split:
    """This Python's standard library, see `load_files`."""
    return split(*load_files())


def split(train: dict[str, str], held_out: dict[str, str]) -> Split:
    """Leave near copies of held-out files out of `train`."""
    held = {name: passages(text) for name, text in held_out.items()}
    every_held = set().union(*held.values())
    near = []
    for name, text in train.items():
        own = passages(text)
        common = own & every_held
        of_held = [len(common & of) / max(1, len(of)) for of in held.values()]
        if max([len(common) / max(1, len(own)), *of_held]) > MOST_SHARED:
            near.append(name)
    return Split({n: t for n, t in train.items() if n not in near}, held_out, tuple(near))


def passages(text: str) -> set[str]:
    """Every run of `PASSAGE_LINES` lines, blank lines and indentation aside."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {"\n".join(lines[i : i + PASSAGE_LINES]) for i in range(len(lines) - PASSAGE_LINES + 1)}


def train_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries, the last four being the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_stream(tokenizer: Tokenizer, files: dict[str, str]) -> torch.Tensor:
    """All files of a part as one int64 stream, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(files.values())):
        ids += [*encoding.ids, end]
    return torch.tensor(ids)


class WindowSampler:
    """Random windows of a token stream.

    Some are made chat turns: the user's text, then its continuation. `chat_share`: their share.
    """

    def __init__(
        self, stream: torch.Tensor, tokenizer: Tokenizer, length: int, chat_share: float
    ) -> None:
        self.stream, self.length, self.chat_share = stream, length, chat_share
        self._end = tokenizer.token_to_id(IM_END)
        self._user = tokenizer.encode(f"{IM_START}user\n").ids
        self._turn = tokenizer.encode(f"{IM_END}\n{IM_START}assistant\n").ids

    def sample(self, batch: int, rng: random.Random) -> torch.Tensor:
        """Returns int64 `[batch, length]`."""
        return torch.stack([self._window(rng) for _ in range(batch)])

    def _window(self, rng: random.Random) -> torch.Tensor:
        start = rng.randrange(len(self.stream) - self.length)
        text = self.stream[start : start + self.length].tolist()
        if rng.random() < self.chat_share:
            cut = rng.randrange(24, 200)
            text = self._user + text[:cut] + self._turn + text[cut:]
        return torch.tensor(text[: self.length])
